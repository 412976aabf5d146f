"""What frozen parameters and averages of weights cost in plans, and what cannot be frozen."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

import hflow
from hflow.cost.compute import update_s
from hflow.cost.residency import residency
from hflow.cost.resident_memory import average_bytes, optimizer_bytes, resident_bytes
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph, Model
from hflow.plan.cluster_file import load_cluster
from hflow.plan.frozen import TrainedWith, frozen_names
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import parameters
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.plan.run_state import AverageTensor, TrainedTensor, run_state
from hflow.plan.strategy import PLAIN, Strategy

SHAPE = NAMED_SHAPES["llama-7b"]
PARAMETERS_7B = 6_738_415_616  # Llama 2 7B, as published
EMBEDDING_7B, LAYER_7B = 32_000 * 4096, 4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096
ONE, EIGHT = Mesh.of((0,)), Mesh.of(tuple(range(8)), dp=8)
FREEZE = ("embed*", "layers.[0-7].*")
TRAINED = PARAMETERS_7B - EMBEDDING_7B - 8 * LAYER_7B
EMA = "models.ref.refresh={from: actor, every: 1, decay: 0.99}"


def graph_of(*more: str, model: str = "shape:llama-7b") -> Graph:
    return hflow.load("grpo", [f"params.model={model}", "models.actor.dtype=bf16", *more])


def actor_bytes(plan: Plan) -> int:
    """What the actor keeps on a device at the peak."""
    return sum(size for label, size in plan.memory[0].parts.items() if label.startswith("actor weights"))


def test_a_frozen_parameter_is_a_weight_alone() -> None:
    assert resident_bytes(SHAPE, "bf16", ONE, True, PLAIN, FREEZE) == 2 * PARAMETERS_7B + 16 * TRAINED
    assert resident_bytes(SHAPE, "f32", ONE, True, PLAIN, FREEZE) == 4 * PARAMETERS_7B + 12 * TRAINED
    split = resident_bytes(SHAPE, "bf16", EIGHT, True, Strategy(zero=1), FREEZE)
    assert split == 2 * PARAMETERS_7B + (4 + 12 / 8) * TRAINED
    assert optimizer_bytes(SHAPE, "bf16", ONE, PLAIN, FREEZE) == 12 * TRAINED
    assert resident_bytes(SHAPE, "bf16", ONE, False, PLAIN, FREEZE) == 2 * PARAMETERS_7B


def test_stages_without_anything_to_train_keep_weights() -> None:
    """Of four stages of eight layers the second is the fullest to train, the last the fullest of all."""
    stages, outside = Mesh.of((0, 1, 2, 3), pp=4), EMBEDDING_7B + 4096
    fullest = 8 * LAYER_7B + outside
    assert resident_bytes(SHAPE, "bf16", stages, True, PLAIN, FREEZE) == 18 * fullest
    last = (*FREEZE, "norm*", "lm_head*")
    assert resident_bytes(SHAPE, "bf16", stages, True, PLAIN, last) == 2 * fullest + 16 * 8 * LAYER_7B


def test_an_average_is_a_float32_of_every_parameter() -> None:
    cluster, model = load_cluster("h100x8"), Model("actor", "", dtype="bf16")
    assert average_bytes(SHAPE, ONE) == 4 * PARAMETERS_7B
    plain, averaged = (
        residency(
            model, SHAPE, EIGHT, PLAIN, cluster, "train", offload=offload, trained=TrainedWith((), count)
        )
        for count, offload in ((0, True), (2, True))
    )
    assert averaged.always.size == plain.always.size + 2 * 4 * PARAMETERS_7B
    assert averaged.in_use.size == plain.in_use.size + 2 * 4 * PARAMETERS_7B
    assert averaged.loaded_bytes == plain.loaded_bytes  # it stays
    assert averaged.snapshot_bytes == plain.snapshot_bytes + PARAMETERS_7B  # a rank's part of eight


def test_a_checkpoint_of_frozen_parameters_has_no_moments() -> None:
    cluster, model = load_cluster("h100x8"), Model("actor", "", dtype="bf16")
    trained = TrainedWith(FREEZE)
    kept = residency(model, SHAPE, EIGHT, PLAIN, cluster, "train", trained=trained)
    assert kept.snapshot_bytes == (4 * PARAMETERS_7B + 8 * TRAINED) / 8


def test_an_update_costs_its_share() -> None:
    cluster = load_cluster("h100x8")
    all_s, some_s = (update_s(SHAPE, "bf16", ONE, cluster, PLAIN, freeze) for freeze in ((), FREEZE))
    assert some_s == pytest.approx(all_s * TRAINED / PARAMETERS_7B, rel=1e-6)


def test_plans_count_both() -> None:
    pins = [f"{node}=tp8@0-7" for node in ("rollout", "ref_logprobs", "actor_train")]
    freeze = 'nodes.actor_train.with.freeze=["embed*", "layers.[0-7].*"]'
    plain, frozen, averaged = (
        hflow.compile(graph_of(*more), "h100x8", pins) for more in ((), (freeze,), (EMA,))
    )
    saved = 16 * (PARAMETERS_7B - TRAINED) / 8
    assert actor_bytes(plain) - actor_bytes(frozen) == pytest.approx(saved, rel=0.01)  # norms are not split
    assert actor_bytes(averaged) - actor_bytes(plain) == pytest.approx(4 * PARAMETERS_7B / 8, rel=0.01)
    assert frozen.node("actor_train").time_s < 0.95 * plain.node("actor_train").time_s
    assert averaged.node("actor_train").time_s == plain.node("actor_train").time_s
    assert averaged.step_time_s > plain.step_time_s
    (edge,) = (e for e in averaged.step.edges if e.target == "ref_logprobs" and e.kind == "weights")
    assert edge.size_bytes == 4 * PARAMETERS_7B  # float32 moves, whatever the dtype of both models


def test_the_state_of_a_run_names_what_there_is() -> None:
    freeze = 'nodes.actor_train.with.freeze=["embed*", "layers.[0-7].*"]'
    plan = hflow.compile(graph_of(EMA, freeze), "h100x8")
    names = {p.name for p in parameters(SHAPE)}
    frozen = {n for n in names if n.startswith("model.embed") or fnmatch(n, "model.layers.[0-7].*")}
    state = run_state(plan)
    kinds: dict[str, set[str]] = {}
    for tensor in (t for t in state if isinstance(t, TrainedTensor)):
        kinds.setdefault(tensor.parameter.name, set()).add(tensor.kind)
    assert kinds == {n: {"weights"} if n in frozen else {"weights", "exp_avg", "exp_avg_sq"} for n in names}
    averages = [t for t in state if isinstance(t, AverageTensor)]
    assert {t.parameter.name: t.dtype for t in averages if t.parameter} == dict.fromkeys(names, "f32")
    (version,) = (t for t in averages if t.parameter is None)
    assert (version.dtype, version.shape, version.optional) == ("i64", (), True)
    assert not any("refreshed" in t.name for t in state)  # the average is all that its reader has
    assert len({t.name for t in state}) == len(state)


def test_patterns_match_names_with_and_without_model() -> None:
    for patterns in (("model.layers.1.*",), ("layers.1.*",)):
        found = frozen_names(SHAPE, patterns)
        assert len(found) == 9 and all(name.startswith("model.layers.1.") for name in found)
    assert frozen_names(SHAPE, ("lm_head*",)) == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ("layers.40.*", "has no parameter of such a name"),
        ('["embed*", "layer.0.*"]', "freezes `layer.0.*`"),
        ("'*.q_proj.*'", "they are one matrix"),
        ("'*.up_proj.*'", "they are one matrix"),
        ("'*'", "trains nothing"),
    ],
)
def test_what_cannot_be_frozen_is_refused(freeze: str, message: str) -> None:
    with pytest.raises(HflowError) as caught:
        hflow.compile(graph_of(f"nodes.actor_train.with.freeze={freeze}"), "h100x8")
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF212" and message in problem.message and problem.help and problem.span


def test_experts_of_a_layer_are_frozen_together() -> None:
    model = "shape:qwen3-30b-a3b"
    with pytest.raises(HflowError, match=r"HF212.*they are one matrix"):
        hflow.compile(graph_of("nodes.actor_train.with.freeze='*.experts.3.*'", model=model), "h100x16")
    assert hflow.compile(graph_of("nodes.actor_train.with.freeze='*.experts.*'", model=model), "h100x16")


def test_a_plan_edited_by_hand_cannot_take_matrices_apart(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    hflow.compile(graph_of("nodes.actor_train.with.freeze=embed*"), "h100x8").save(file)
    file.write_text(file.read_text().replace('"embed*"', '"*.q_proj.*"'))
    with pytest.raises(HflowError, match="they are one matrix") as caught:
        load_plan(file)
    assert caught.value.diagnostics[0].code == "HF306"


def test_a_tied_model_has_no_head_to_freeze() -> None:
    graph = graph_of("nodes.actor_train.with.freeze=lm_head*", model="shape:qwen2.5-0.5b")
    with pytest.raises(HflowError, match=r"no parameter of such a name"):
        hflow.compile(graph, "h100x8")


def test_balanced_experts_take_a_forward_pass_more() -> None:
    """Over all layers, and without the head; where there are experts."""
    option = "nodes.actor_train.with.balance_coef=0.01"
    with pytest.raises(HflowError) as caught:
        hflow.compile(graph_of(option), "h100x8")
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF212" and "no experts to balance" in problem.message
    pins = ("actor_train=dp16,ep16,zero1,micro2,recompute@0-15",)
    plain, balanced = (
        hflow.compile(graph_of(*more, model="shape:qwen3-30b-a3b"), "h100x64", pins).node("actor_train")
        for more in ((), (option,))
    )
    assert 1.1 < balanced.time_s / plain.time_s < 1.34
