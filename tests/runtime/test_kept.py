"""Runs of truncated samples: the first update compares log-probs of one distribution, under any plan, and the
next steps sample the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import hflow
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
GRAPH = Path(__file__).parent / "graphs" / "kept.yaml"


def test_the_first_ratio_is_one_and_plans_agree(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    """On one worker, and with the sets moved from two that sample to two that train and one that scores."""
    graph = hflow.load(GRAPH, [f"params.model={tiny_model}", "params.steps=3"])
    one = hflow.compile(graph, "local1")
    pins = ("rollout=dp2@0-1", "actor_train=tp2@2-3", "ref_logprobs=dp2@1-2")
    apart = hflow.compile(graph, "local4", pins)
    folders = {"one": one, "apart": apart}
    runs = [execute(p, tmp_path / name, pool=workers) for name, p in folders.items()]
    for mine, other in zip(*(run.metrics for run in runs), strict=True):
        for line in (mine, other):  # a step may have nothing but rows that were cut
            assert line.get("actor_train.mismatch", 0.0) < 1e-5
        assert mine["digest.rollout"] == other["digest.rollout"]
        for name in ("rollout.overflown_rows", "rollout.truncated_rows"):
            assert mine[name] == other[name]
    first, also = (run.metrics[0] for run in runs)  # of the same weights
    assert first["loss.actor_train"] == pytest.approx(also["loss.actor_train"], rel=1e-5, abs=1e-7)
    assert first["actor_train.grad_norm"] == pytest.approx(also["actor_train.grad_norm"], rel=1e-4)
    assert "actor_train.mismatch" in first and first["actor_train.grad_norm"] > 1e-3
    assert 0 < first["rollout.overflown_rows"] + first["rollout.truncated_rows"] < graph.node("rollout").rows
    for mine, other in zip(*(run.metrics for run in runs), strict=True):
        assert mine["loss.actor_train"] == pytest.approx(other["loss.actor_train"], rel=1e-4, abs=1e-6)
    assert len({line["digest.rollout"] for line in runs[0].metrics}) == 3
    one_model, other_model = (load_file(run.folder / "export/actor/model.safetensors") for run in runs)
    apart_by = {name: float((other_model[name] - one_model[name]).abs().max()) for name in one_model}
    # The advantage of most rows that learn is 0. The rounding that their penalty leaves in the first step
    # moved embeddings by 4e-5. Output weights at which two rows of a prompt cancel still move so.
    assert max(apart_by.values()) < 2e-4 and apart_by["model.embed_tokens.weight"] < 1e-5
