"""Models that read one another's tokens have one vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.runtime.new_model import new_model

SMALL = ["params.batch=4", "params.minibatch=4", "params.holdout=4"]


def model(folder: Path, alphabet: str, head: str = "lm") -> Path:
    new_model(folder, layers=1, hidden=16, heads=2, ffn=16, alphabet=alphabet, head=head)  # type: ignore[arg-type]
    return folder


def test_a_judge_with_other_tokens_is_refused(tmp_path: Path) -> None:
    actor = model(tmp_path / "actor", "0123456789+-=")
    judges = {
        "same": model(tmp_path / "same", "0123456789+-=", "scalar"),
        "reordered": model(tmp_path / "reordered", "=-+9876543210", "scalar"),
        "larger": model(tmp_path / "larger", "0123456789+-=abcdefghijklmnop", "scalar"),
    }
    for name, folder in judges.items():
        given = [f"params.model={actor}", f"params.reward_model={folder}", *SMALL]
        graph = hflow.load("algorithms/ppo.yaml", given)
        if name == "same":
            assert hflow.compile(graph, "local1").nodes
            continue
        with pytest.raises(HflowError) as caught:
            hflow.compile(graph, "local1")
        (problem,) = caught.value.diagnostics
        assert problem.code == "HF308" and "`reward`" in problem.message and "`actor`" in problem.message
        assert problem.span and problem.span.file == "algorithms/ppo.yaml"
