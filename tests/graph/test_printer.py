"""The inferred graph of every algorithm, as text. To accept a change:

python -m tests.graph.test_printer
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.graph.evaluation import evaluation_graph
from hflow.graph.load import load
from hflow.graph.write.printer import ir

GOLDEN = Path("tests/golden/graph")
ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))


def printed(path: Path) -> dict[str, str]:
    """The golden files of one algorithm, by name."""
    graph = load(path)
    evaluation = evaluation_graph(graph)
    texts = {f"{path.stem}.ir": ir(graph)}
    return texts | ({f"{path.stem}.evaluation.ir": ir(evaluation)} if evaluation else {})


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_the_text_is_the_golden_one(path: Path) -> None:
    for name, text in printed(path).items():
        assert text == (GOLDEN / name).read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {f.name for f in GOLDEN.iterdir()} == {name for path in ALGORITHMS for name in printed(path)}


if __name__ == "__main__":
    for algorithm in ALGORITHMS:
        for file, content in printed(algorithm).items():
            (GOLDEN / file).write_text(content)
