"""Texts carry the version of the weights that sampled them, and a train node looks at it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.plan import Plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.rows import Rows, concatenate, from_lists
from hflow.runtime.worker.staleness import UNKNOWN, sampled, versions

GRAPH = Path(__file__).parent / "graphs/lagged.yaml"
PLANS = {
    "together": ("rollout=dp2@0-1", "actor_train=dp2@0-1"),
    "apart": ("rollout=tp2@2-3", "actor_train=dp2@0-1"),
    "resharded": ("rollout=dp2@0-1", "actor_train=tp2@0-1"),
}


def compiled(model: Path, pins: tuple[str, ...], lag: int = 1) -> Plan:
    graph = hflow.load(GRAPH, [f"params.model={model}", f"params.lag={lag}", "params.steps=4"])
    return hflow.compile(graph, "clusters/local4.yaml", pins)


def allowing(graph: Graph, lag: int) -> Graph:
    """The graph with another `max_lag`, which no file could say: HF223 is found when it is loaded."""
    nodes = (replace(n, options={**n.options, "max_lag": lag}) if n.op == "train" else n for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize("pins", PLANS.values(), ids=PLANS)
def test_age_is_that_of_the_schedule(workers: Pool, tiny_model: Path, tmp_path: Path, pins) -> None:
    """Steps 0 and 1 sample with the initial weights, which are one update old in step 1."""
    run = execute(compiled(tiny_model, pins), tmp_path / "lagged", pool=workers, export=False)
    assert [m["actor_train.staleness"] for m in run.metrics] == [0.0, 1.0, 1.0, 1.0]
    run = execute(compiled(tiny_model, pins, lag=0), tmp_path / "on-policy", pool=workers, export=False)
    assert [m["actor_train.staleness"] for m in run.metrics] == [0.0] * 4


def test_older_texts_than_allowed_end_the_run(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    plan = compiled(tiny_model, PLANS["apart"])
    plan = replace(plan, step=replace(plan.step, graph=allowing(plan.graph, 0)))
    with pytest.raises(HflowError, match="HF409") as caught:
        execute(plan, tmp_path / "run", pool=workers, export=False)
    assert "texts are up to 1 updates old; `max_lag` is 0" in caught.value.diagnostics[0].message
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1  # step 0 was on-policy


def test_a_conversation_is_as_old_as_its_oldest_turn() -> None:
    texts = from_lists([[1], [2, 3], [4]])
    earlier = replace(texts, versions=torch.tensor([3, 5, UNKNOWN]))
    assert versions(sampled(texts, 4, [earlier, texts])).tolist() == [3, 4, 4]


def test_versions_go_with_their_rows() -> None:
    rows = Rows(torch.arange(4), None, torch.tensor([0, 1, 2, 3]))
    ragged = replace(from_lists([[1, 1], [2], [3, 3, 3], [4]]), versions=rows.versions)
    for some in (rows, ragged):
        assert versions(some.slice(1, 3)).tolist() == [1, 2]
        assert versions(some.take(torch.tensor([3, 0]))).tolist() == [3, 0]
        assert versions(concatenate([some.slice(2, 4), some.slice(0, 1)])).tolist() == [2, 3, 0]
    assert versions(from_lists([[1], [2]])).tolist() == [UNKNOWN, UNKNOWN]
