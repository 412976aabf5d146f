"""The mended file is empty; copies of it that pip keeps are not."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from scripts.mend_torchvision import mend


def test_a_file_is_emptied_once_and_its_links_are_kept(tmp_path: Path) -> None:
    file, cached = tmp_path / "_meta_registrations.py", tmp_path / "cached"
    file.write_text("import nothing\n")
    cached.hardlink_to(file)
    assert mend(file) and file.read_bytes() == b""
    assert not mend(file) and cached.read_text() == "import nothing\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_meta_registrations.py", "cached"]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("torchvision") is None or torch.version.cuda is not None, reason="make setup-sglang"
)
def test_torchvision_can_be_imported() -> None:
    program = "import torchvision; print(torchvision.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
