"""A script that defines a reward and runs a graph with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hflow
from hflow.ops.op import op

@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def digits(text, answer):
    return [[float(len(t)) for t in samples] for samples in text]

def main():
    own = ["params.model=MODEL", "params.steps=1", "nodes.reward.fn=REFERENCE"]
    graph = hflow.load("graph.yaml", own)
    run = hflow.execute(hflow.compile(graph, "local1"), run_dir="run", workers="inline", export=False)
    print(run.status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("reference", ["./script.py:digits", "script.digits"])
def test_it_runs_once(guarded: bool, reference: str, tiny_model: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parent / "grpo_small.yaml").read_text()
    sums = (Path(__file__).parent / "sums.jsonl").absolute()
    (tmp_path / "graph.yaml").write_text(text.replace("tests/runtime/sums.jsonl", str(sums)))
    (tmp_path / "rewards.py").write_text(SCRIPT[: SCRIPT.index("def main")])
    end = 'if __name__ == "__main__":\n    main()\n' if guarded else "main()\n"
    (tmp_path / "script.py").write_text(
        SCRIPT.replace("MODEL", str(tiny_model)).replace("REFERENCE", reference) + end
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    if guarded:
        assert done.stdout.strip() == "finished", done.stderr
    else:
        assert "HF205" in done.stderr and "__main__" in done.stderr, done.stderr
