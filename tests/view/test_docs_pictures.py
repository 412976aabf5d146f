"""The picture in the documentation is what hflow draws now. To accept a change:

python -m tests.view.test_docs_pictures
"""

from __future__ import annotations

from pathlib import Path

from hflow.graph.load import load
from hflow.view.svg import graph_svg

ROOT = Path(__file__).parent.parent.parent
PICTURE = ROOT / "docs" / "grpo.svg"


def drawn() -> str:
    return graph_svg(load(ROOT / "algorithms" / "grpo.yaml")) + "\n"


def test_the_picture_of_grpo_is_up_to_date() -> None:
    assert PICTURE.read_text() == drawn()


if __name__ == "__main__":
    PICTURE.write_text(drawn())
