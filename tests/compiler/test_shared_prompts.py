"""Generation on more replicas than there are prompts: what plans say of it, and at what price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hflow
from hflow.cost.compute import node_time_s
from hflow.cost.paged_cache import cache_tokens
from hflow.cost.working_memory import working_bytes
from hflow.diagnostics import HflowError
from hflow.graph.lengths import Lengths
from hflow.plan.cluster_file import load_cluster
from hflow.plan.engine_registry import GenerationEngine
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.plan.strategy import Strategy
from hflow.plan.verify.placement_consistency import misplaced
from hflow.plan.workload import Workload
from tests.compiler.workloads import large

PINS = ("rollout=dp4,tp2@0-7", "ref_logprobs=dp2@0-1", "actor_train=dp2,tp4@0-7")


def compiled(*pins: str, prompts: int = 2, samples: int = 4) -> Plan:
    sizes = f"params.batch={prompts}", f"params.group={samples}", f"params.minibatch={prompts * samples}"
    graph = large("grpo", "qwen2.5-7b", *sizes)
    return hflow.compile(graph, "h100x8", pins)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compiled(*PINS)


def test_nodes_without_a_model_see_the_replicas_of_a_prompt_as_one(plan: Plan) -> None:
    assert (plan.node("rollout").mesh.dp, plan.node("rollout").mesh.tp) == (4, 2)
    for name in ("prompts", "reward"):
        mesh = plan.node(name).mesh
        assert (mesh.dp, mesh.tp) == (2, 4) and mesh.devices == plan.node("rollout").mesh.devices
    edges = {(edge.source, edge.target): edge for edge in plan.step.edges if edge.kind == "data"}
    assert edges["prompts", "rollout"].collective == "alias"
    assert edges["rollout", "reward"].collective != "alias"


def test_it_round_trips(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash


def test_a_rollout_that_shares_nothing_out_is_no_plan(plan: Plan) -> None:
    """Edited by hand: three replicas have no equal parts of two prompts of four samples."""
    assert not list(misplaced(plan))
    three = Mesh.of(tuple(range(6)), dp=3, tp=2)
    nodes = tuple(replace(own, mesh=three) if own.node == "rollout" else own for own in plan.nodes)
    assert "`rollout` cannot share its prompts among dp3" in list(misplaced(replace(plan, nodes=nodes)))


@pytest.mark.parametrize(
    ("pin", "why"),
    [
        ("rollout=dp8@0-7", "dp8 does not divide 2 prompts, nor the 6 samples of each"),
        ("rollout=dp4,micro2@0-3", "micro2 splits groups of 3 rows"),
        ("rollout=dp4,micro6@0-3", "micro6 is more than the 3 rows of a replica"),
        ("ref_logprobs=dp4@0-3", "dp4 does not divide 2 groups of 6 rows"),
        ("actor_train=dp4@0-3", "dp4 does not divide 2 groups of 6 rows"),
    ],
)
def test_why_not(pin: str, why: str) -> None:
    with pytest.raises(HflowError, match=f"(?s)HF302.*{why}"):
        compiled(pin, samples=6)


def test_an_evaluation_keeps_its_prompts_whole() -> None:
    graph = large("grpo", "qwen2.5-7b", "params.batch=2", "params.minibatch=16", "params.holdout=4")
    assert hflow.compile(graph, "h100x8", ["rollout=dp4@0-3"]).node("rollout").mesh.dp == 4
    with pytest.raises(HflowError, match="dp8 is more than the 4 evaluation rows"):
        hflow.compile(graph, "h100x8", ["rollout=dp8@0-7"])


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("engine", ["megatron", "sglang"])
def test_half_of_the_samples_cost_what_a_prompt_of_its_own_with_as_many_does(
    engine: GenerationEngine, stated: bool
) -> None:
    """Each replica reads one prompt and makes four rows, whether others share it or not."""
    shape, cluster = NAMED_SHAPES["qwen2.5-7b"], replace(load_cluster("h100x8"), hosts=2)
    mesh, strategy = Mesh.of(tuple(range(16)), dp=16), Strategy(engine=engine)
    lengths = (Lengths.of(1000, 400, {}), Lengths.of(2000, 700, {})) if stated else (None, None)
    shared = Workload(64, 1000, 2000, 8, prompts=lengths[0], responses=lengths[1], alike=8)
    own = replace(shared, samples=4, alike=4)
    for rows in (1, 2, 4):
        run = shape, "bf16"
        seconds = [node_time_s("generate", *run, w, mesh, rows, cluster, strategy) for w in (shared, own)]
        sizes = [working_bytes("generate", *run, w, mesh, rows, strategy) for w in (shared, own)]
        rooms = [cache_tokens(w, mesh.dp, rows, engine) for w in (shared, own)]
        assert seconds[0] == seconds[1] > 0 and sizes[0] == sizes[1] > 0 and rooms[0] == rooms[1] > 0
