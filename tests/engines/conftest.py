from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.models import Folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Tiny HF models by (family, tied)."""
    root: Path = tmp_path_factory.mktemp("models")
    return Folders(root)
