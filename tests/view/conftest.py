"""Golden texts: `HFLOW_WRITE_GOLDEN=1 pytest tests/view` writes them anew; read the diff afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "golden" / "view"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    def check(name: str, text: str) -> None:
        file = FOLDER / name
        if os.environ.get("HFLOW_WRITE_GOLDEN"):
            file.write_text(text + "\n")
        assert text + "\n" == file.read_text()

    return check
