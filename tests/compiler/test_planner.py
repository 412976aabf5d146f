"""What the planner says of a plan is what the passes after it find: the time of a step, and that it fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import hflow
from hflow.compiler.compile import compile_graph, new_draft
from hflow.compiler.memory import device_memory
from hflow.compiler.options import PLACEMENTS, PlacementPolicy, PlannerOptions
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.lower_edges import lower_edges
from hflow.compiler.passes.schedule import schedule
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.planner.search import search
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.step import node_plans
from hflow.compiler.state import Draft
from hflow.graph.ir import Graph
from hflow.plan.cluster_file import load_cluster
from tests.compiler.small_cases import GRAPHS, case, space_of
from tests.compiler.workloads import ALGORITHMS, large, model_params


@pytest.mark.rotating(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_the_schedule_agrees_on_small_cases(name: str) -> None:
    for seed in range(15):
        draft = case(name, seed, 1500)
        agrees(draft, space_of(draft))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("cluster", ["a100x16", "h100x8", "a100x64"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_schedule_agrees_on_large_clusters(algorithm: str, cluster: str) -> None:
    """Any choice will do, so the first that fits is taken."""
    graph = large(algorithm, "llama-7b")
    for placement in PLACEMENTS:
        draft = _draft(graph, cluster, placement)
        agrees(draft, SearchSpace(draft), budget_s=0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_schedule_agrees_on_the_machine_at_hand(algorithm: str, model: str) -> None:
    overrides = [f"params.{name}={model}" for name in model_params(algorithm)]
    draft = _draft(hflow.load(Path(f"algorithms/{algorithm}.yaml"), overrides), "local4", "auto")
    agrees(draft, SearchSpace(draft), budget_s=1.0)


@pytest.mark.rotating(6)
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax"])
def test_more_hosts_are_never_slower(algorithm: str) -> None:
    """What fits on some hosts can be done on them when there are more."""
    graph = large(algorithm, "llama-7b")
    clusters = [load_cluster(f"a100x{gpus}") for gpus in (8, 16, 32, 64, 96)]
    seconds = [compile_graph(graph, cluster).step_time_s for cluster in clusters]
    assert all(more <= fewer * (1 + RESOLUTION) for fewer, more in pairwise(seconds))


def agrees(draft: Draft, space: SearchSpace, budget_s: float = float("inf")) -> None:
    """Fails unless `schedule` and `check_memory` say of the choice that is found what the planner says."""
    choice = search(space, budget_s).choice
    if choice is None:
        return
    nodes = node_plans(draft.graph, space.groups, choice.assignments, choice.configs)
    planned = schedule(lower_edges(replace(draft, nodes=nodes)))
    assert planned.step_time_s == pytest.approx(choice.step_s, rel=1e-6)
    programs = [p for p in (planned.step, planned.evaluation) if p]
    for memory in device_memory(planned, planned.nodes, programs):
        assert memory.peak_bytes <= memory.capacity_bytes, (memory.node, memory.parts)


def _draft(graph: Graph, cluster: str, placement: PlacementPolicy) -> Draft:
    options = PlannerOptions(placement=placement)
    return candidates(weight_edges(new_draft(graph, load_cluster(cluster), (), options)))
