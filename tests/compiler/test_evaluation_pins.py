"""Pins of an evaluation's nodes: where they run, what their weights cost in bytes, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.edges import WeightEdge
from hflow.plan.parameters import num_parameters
from hflow.plan.plan import Plan

GRAPH = Path(__file__).parent.parent / "runtime" / "graphs" / "evaluated.yaml"
APART = ("actor_train=tp2@0-1", "rollout=tp2@0-1", "ref_logprobs=tp2@0-1")


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Its evaluations: `greedy` of 7 rows, `sampled` of 5."""
    return hflow.load(GRAPH, ["params.model=shape:qwen2.5-0.5b", "models.actor.dtype=f32"])


def compiled(graph: Graph, *pins: str) -> Plan:
    return hflow.compile(graph, "h100x8", pins)


def weight_edge(plan: Plan, name: str) -> WeightEdge:
    return next(e for e in plan.evaluating(name).edges if isinstance(e, WeightEdge))


@pytest.mark.parametrize(
    ("pin", "axes", "devices"),
    [
        ("rollout@greedy=dp2@2-3", (1, 2, 1), (2, 3)),
        ("rollout@greedy=@4-7", (1, 2, 2), (4, 5, 6, 7)),  # tp as in the step
        ("rollout@greedy=tp1", (1, 2, 1), (0, 1)),  # devices as in the step
        ("rollout@greedy=@5", (1, 1, 1), (5,)),
        ("rollout@greedy=dp7@1-7", (1, 7, 1), (1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_what_a_pin_leaves_open_is_as_in_the_step(
    graph: Graph, pin: str, axes: tuple[int, ...], devices: tuple[int, ...]
) -> None:
    plan = compiled(graph, *APART, pin)
    mesh = plan.node("rollout@greedy").mesh
    assert ((mesh.pp, mesh.dp, mesh.tp), tuple(sorted(mesh.devices))) == (axes, devices)
    others = {n.node: n.mesh for n in compiled(graph, *APART).all_nodes if n.node != "rollout@greedy"}
    assert {n.node: n.mesh for n in plan.all_nodes if n.node != "rollout@greedy"} == others


@pytest.mark.parametrize(
    ("step", "pin", "expected"),
    [
        ("dp4,tp1,ep4@0-3", "dp2,tp2@0-3", (2, False)),  # cut as in the step, as far as dp divides
        ("dp4,tp2,ep8,etp1@0-7", "dp2,tp4@0-7", (8, True)),
        ("dp4,tp2,ep8,etp1@0-7", "dp4,tp1@0-3", (4, False)),  # nothing is cut, and 8 ranks there are not
        ("dp4,tp2,ep4@0-7", "dp4,tp2,ep8,etp1@0-7", (8, True)),
        ("dp4,tp1,ep1@0-3", "dp4,tp2,etp1@0-7", None),
    ],
)
def test_experts_are_shared_as_in_the_step_or_as_pinned(
    step: str, pin: str, expected: tuple[int, bool] | None
) -> None:
    graph = hflow.load(GRAPH, ["params.model=shape:qwen3-30b-a3b"])
    pins = ("actor_train=dp8,tp2,ep8,zero1@0-15", f"rollout={step}", "ref_logprobs=dp8,ep8@8-15")
    if expected is None:
        with pytest.raises(HflowError, match="the step's ep1 is none for it: name one, like ep2"):
            hflow.compile(graph, "h100x16", [*pins, f"rollout@greedy={pin}"])
        return
    strategy = (
        hflow.compile(graph, "h100x16", [*pins, f"rollout@greedy={pin}"]).node("rollout@greedy").strategy
    )
    assert (strategy.ep, strategy.whole_experts) == expected


@pytest.mark.parametrize("rows", [8, 30])
def test_few_rows_of_an_evaluation_keep_no_step_from_more_replicas(rows: int) -> None:
    """The step is as long as without the evaluation, which has a replica for each row at most."""
    sets = ["params.model=shape:qwen3-8b", "params.batch=512", "params.group=8", "params.minibatch=4096"]
    sets.append("params.max_new_tokens=1024")
    alone = hflow.load("algorithms/grpo.yaml", sets)
    graph = hflow.load(GRAPH.with_name("few_rows.yaml"), [*sets, f"evaluations.test.rows={rows}"])
    plan, without = hflow.compile(graph, "h100x64"), hflow.compile(alone, "h100x64")
    assert plan.step_time_s == pytest.approx(without.step_time_s, rel=2e-3)
    assert plan.node("rollout").mesh.dp > rows >= plan.node("rollout@test").mesh.dp
    assert plan.search.pinned == () and plan.search.gap == 0.0


def test_models_that_are_not_trained_stay_with_the_step() -> None:
    """PPO's reward model scores the evaluation, too."""
    evaluation = "evaluations={test: {rows: 8, metrics: {m: {mean: reward.score}}}}"
    models = [f"params.{name}=shape:qwen2.5-0.5b" for name in ("model", "reward_model")]
    plan = hflow.compile(hflow.load("algorithms/ppo.yaml", [*models, evaluation]), "h100x16")
    assert plan.node("reward@test").mesh == plan.node("reward").mesh
    assert plan.node("reward").mesh.dp <= 8


def test_the_search_tells_pins_of_the_step_alone(graph: Graph) -> None:
    plan = compiled(graph, *APART, "rollout@greedy=dp2@2-3")
    assert sorted(plan.search.pinned) == ["actor_train", "ref_logprobs", "rollout"]
    assert compiled(graph, "rollout@greedy=@5").search.pinned == ()


def test_the_search_tells_no_pins_that_a_shared_base_has_spread() -> None:
    """`actor_train`'s pin says of `critic_train` where its base lies, too."""
    paths = [f"params.{name}=shape:qwen2.5-0.5b" for name in ("model", "reward_model")]
    graph = hflow.load(GRAPH.with_name("adapted_ppo.yaml"), paths)
    assert compiled(graph, "actor_train=dp2@0-1").search.pinned == ("actor_train",)


def test_each_device_of_its_own_receives_the_whole_model(graph: Graph) -> None:
    """Of dp2, in f32; the step's own layout is the trainer's, so nothing moves to it."""
    plan = compiled(graph, *APART, "rollout@greedy=dp2@2-3")
    size = 4 * num_parameters(plan.shapes["actor"])
    edge = weight_edge(plan, "greedy")
    assert edge.bytes_per_device == edge.lower_bound_bytes_per_device == size
    assert weight_edge(plan, "sampled").bytes_per_device == 0
    parts = {m.devices: m.parts for m in plan.memory}[2, 3]
    assert parts["actor weights (dp2 @2-3)"] == size
    assert set(parts) == {"actor weights (dp2 @2-3)", "rollout@greedy working set"}


def test_on_the_trainers_devices_half_of_the_model_moves(graph: Graph) -> None:
    """Each device has a half, and needs all."""
    plan = compiled(graph, *APART, "rollout@greedy=dp2")
    half = 2 * num_parameters(plan.shapes["actor"])
    assert weight_edge(plan, "greedy").bytes_per_device == pytest.approx(half, rel=1e-3)


def test_more_devices_take_less_time(graph: Graph) -> None:
    plan = {dp: compiled(graph, *APART, f"rollout@greedy=dp{dp}@2-{1 + dp}") for dp in (1, 2, 4)}
    times = [plan[dp].node("rollout@greedy").time_s for dp in (1, 2, 4)]
    assert times == sorted(times, reverse=True)


def test_rows_at_once_are_those_of_the_pin(graph: Graph) -> None:
    plan = compiled(graph, *APART, "rollout@greedy=micro2", "rollout@sampled=micro6")
    assert [plan.node(f"rollout@{name}").micro_batch for name in ("greedy", "sampled")] == [2, 6]


def test_a_step_on_more_ranks_than_rows_needs_the_evaluation_elsewhere(graph: Graph) -> None:
    """Of the 7 and 5 rows, eight ranks would leave some without any."""
    with pytest.raises(HflowError, match="dp8 is more than the 7 rows of evaluation `greedy`"):
        compiled(graph, "rollout=dp8")
    plan = compiled(graph, "rollout=dp8", "rollout@greedy=@0-3", "rollout@sampled=@0-3")
    assert plan.node("rollout").mesh.dp == 8


@pytest.mark.parametrize(
    ("pin", "reason"),
    [
        ("rollout@greedy=dp8@0-7", "dp8 is more than the 7 rows of evaluation `greedy`"),
        ("rollout@sampled=dp3,tp2", "its sizes do not multiply to its number of devices"),
        ("rollout@sampled=tp4@0-1", "its sizes do not multiply to its number of devices"),
        ("rollout@greedy=tp4@0-3", "tp4 does not divide 14 heads"),
        ("rollout@greedy=pp2@0-1", "generation has no pipeline parallelism"),
        ("rollout@greedy=ep2,dp2@0-1", "`actor` has no experts for ep2"),
        ("rollout@greedy=offload", "`offload` is for nodes of the step"),
        ("rollout@greedy=zero1", "`zero` is for nodes of the step"),
        ("rollout@gredy=dp2", "did you mean `rollout@greedy`?"),
        ("reward@greedy=dp2", "`reward@greedy` runs where its values lie"),
        ("rollout@greedy=@8", "there is no device 8"),
    ],
)
def test_what_cannot_be_is_refused(graph: Graph, pin: str, reason: str) -> None:
    with pytest.raises(HflowError) as refused:
        compiled(graph, pin)
    (found,) = refused.value.diagnostics
    assert found.code == "HF302" and found.message.startswith(f"--pin {pin}: ")
    assert reason in f"{found.message}\n{found.help}"


def test_a_server_answers_where_it_is(graph: Graph) -> None:
    with pytest.raises(HflowError, match="rollout@greedy") as refused:
        hflow.compile(graph, "h100x8", ["rollout@greedy=dp2"], engines=("rollout=sglang",))
    assert refused.value.diagnostics[0].help == "the servers of `rollout` answer it, where they are"


def test_weights_that_are_not_trained_stay() -> None:
    said = "evaluations={far: {rows: 8, metrics: {reward: reward.score}}}"
    models = [f"models.{name}.path=shape:qwen2.5-0.5b" for name in ("actor", "ref", "critic", "reward")]
    ppo = hflow.load(GRAPH.parents[3] / "algorithms" / "ppo.yaml", ["eval=null", said, *models])
    with pytest.raises(HflowError, match="`reward` is not trained, so no weights move to `reward@far`"):
        compiled(ppo, "reward@far=dp2")
