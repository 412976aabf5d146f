"""Notebooks are kept without what they print: `make test` runs them, through nbmake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_have_no_outputs(file: Path) -> None:
    code = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
