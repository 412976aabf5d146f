"""Weight layouts and HybridFlow's zero-redundancy regrouping (arXiv:2409.19256, Table 2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hflow.compiler.lowering import lower_weights
from hflow.compiler.regroup import generation_mesh
from hflow.graph.adapter import Adapter
from hflow.plan.cluster import Cluster, DeviceKind, Link
from hflow.plan.layout import Mesh, volume
from hflow.plan.model_shape import Experts, FamilyName, ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import num_parameters, parameters, stage_elements, weight_boxes
from hflow.plan.sharding import Sharding

SHAPE = ModelShape("qwen2", 4, 64, 8, 4, 8, 96, 32, 128, 1e4, 1e-6, False, True)
TIED = ModelShape("llama", 4, 64, 8, 4, 8, 96, 32, 128, 1e4, 1e-6, True, False)
MOE = ModelShape(
    "qwen3_moe", 4, 64, 8, 4, 16, 48, 32, 128, 1e4, 1e-6, False, False, qk_norm=True, moe=Experts(6, 2, 24)
)
LINK = Link(1e9, 1e-4)
CLUSTER = Cluster("test", DeviceKind("cpu", "cpu", 1e11, 4 * 10**9, 1e10, 0.5, 1e-4), 1, 8, LINK, LINK)
DIVISORS = (1, 2, 4)
PAIR, PAIRS = replace(SHAPE, num_kv_heads=1), replace(MOE, num_kv_heads=2)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_transformers(family: FamilyName, tied: bool) -> None:
    """Names, shapes and order-independent set equal a transformers model's state dict."""
    transformers = pytest.importorskip("transformers")
    shape = ModelShape(
        family, 2, 64, 8, 4, 16, 96, 32, 128, 1e4, 1e-6, tied, family == "qwen2", qk_norm=family == "qwen3"
    )
    config = transformers.AutoConfig.for_model(
        family, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=96, vocab_size=32, head_dim=16, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {p.name: p.shape for p in parameters(shape)} == theirs
    assert num_parameters(shape) == sum(p.numel() for p in model.parameters())


def test_experts_are_listed_as_in_published_files() -> None:
    """The names of Qwen/Qwen3-30B-A3B: a router, and three matrices for every expert, split over tp."""
    found = {p.name: p for p in parameters(MOE) if p.name.startswith("model.layers.3.mlp.")}
    at = "model.layers.3.mlp."
    assert found.pop(f"{at}gate.weight").shape == (6, 64)
    assert len(found) == 6 * 3
    down, up = found[f"{at}experts.5.down_proj.weight"], found[f"{at}experts.5.up_proj.weight"]
    assert (up.shape, up.shard, down.shape, down.shard) == ((24, 64), 0, (64, 24), 1)
    assert num_parameters(MOE) == stage_elements(MOE, 1, 1) == sum(p.size for p in parameters(MOE))


@pytest.mark.parametrize("shape", [SHAPE, TIED, MOE, PAIR, PAIRS])
@pytest.mark.parametrize("pp", DIVISORS)
@pytest.mark.parametrize("tp", DIVISORS)
def test_a_replica_holds_every_element_once_per_stage(shape: ModelShape, pp: int, tp: int) -> None:
    mesh = Mesh.of(tuple(range(pp * tp)), pp=pp, tp=tp)
    held = dict.fromkeys(mesh.devices, 0)
    for parameter in parameters(shape):
        count = np.zeros(parameter.shape, int)
        for device, box in weight_boxes(shape, Sharding(mesh), parameter).items():
            count[tuple(slice(*span) for span in box)] += 1
            held[device] += volume(box)
        copies = 2 if parameter.ends == (True, True) and pp > 1 else 1
        copies *= tp if parameter.shard is None else 1
        if any(projection in parameter.name for projection in ("k_proj", "v_proj")):
            copies *= max(1, tp // shape.num_kv_heads)
        assert (count == copies).all(), parameter.name
    assert max(held.values()) == stage_elements(shape, pp, tp)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp"), [(8, 2, 4), (8, 2, 8), (8, 1, 8), (12, 2, 6), (12, 3, 6)]
)
def test_a_rank_has_the_keys_and_values_of_its_queries(
    heads: int, kv_heads: int, tp: int, adapted: bool
) -> None:
    """As transformers shares them out: query head h has key-value head h // (heads / kv_heads)."""
    adapter = Adapter(2, 4.0, ("q_proj", "k_proj", "v_proj")) if adapted else None
    shape = replace(SHAPE, num_heads=heads, num_kv_heads=kv_heads, adapter=adapter)
    sharding, d = Sharding(Mesh.of(tuple(range(tp)), tp=tp)), shape.head_dim
    of_queries = np.repeat(np.arange(kv_heads), heads // kv_heads)
    boxes = {
        p.name.removeprefix("model.layers.0.self_attn."): weight_boxes(shape, sharding, p)
        for p in parameters(shape)
        if p.layer == 0
    }
    for kind in ("weight", "bias", "lora_B.weight") if adapted else ("weight", "bias"):
        for rank, ((first, last), *_) in boxes[f"q_proj.{kind}"].items():
            (own,) = set(of_queries[first // d : last // d])
            for pair in (boxes[f"{name}_proj.{kind}"][rank] for name in "kv"):
                assert pair[0] == (own * d, (own + 1) * d)


@pytest.mark.parametrize("shape", [SHAPE, TIED, MOE])
def test_chunks_of_layers_are_dealt_out(shape: ModelShape) -> None:
    """Rank r of 2 holds layers r and r + 2 of 4; the fullest rank is the one that the planner counts."""
    sharding = Sharding(Mesh.of((0, 1), pp=2), vpp=2)
    held = [0, 0]
    for parameter in parameters(shape):
        boxes = weight_boxes(shape, sharding, parameter)
        assert parameter.layer is None or [*boxes] == [parameter.layer % 2]
        for device, box in boxes.items():
            held[device] += volume(box)
    assert max(held) == stage_elements(shape, 2, 1, vpp=2)


@pytest.mark.parametrize(
    ("pp", "dp", "tp", "ep"),
    [(1, 4, 1, 2), (2, 2, 2, 1), (2, 2, 2, 2), (1, 6, 2, 2), (1, 6, 2, 3), (4, 12, 1, 3), (1, 6, 1, 6)],
)
@pytest.mark.parametrize("fully", [False, True])
def test_every_expert_lies_on_its_ranks(pp: int, dp: int, tp: int, ep: int, fully: bool) -> None:
    """Of 6 experts, rank d of dp holds 6/ep, from number 6/ep·(d mod ep) on: the ranks that share the experts
    are neighbours in dp (Megatron-core's order tp-ep-dp-pp). A fully sharded model is held once."""
    sharding = Sharding(Mesh.of(tuple(range(pp * dp * tp)), pp=pp, dp=dp, tp=tp), ep, fully)
    held = dict.fromkeys(sharding.mesh.devices, 0)
    for parameter in parameters(MOE):
        boxes = weight_boxes(MOE, sharding, parameter)
        count = np.zeros(parameter.shape, int)
        for device, box in boxes.items():
            count[tuple(slice(*span) for span in box)] += 1
            held[device] += volume(box)
        replicas = {device // tp % dp for device in boxes}
        own = range(dp) if parameter.expert is None else range(parameter.expert // (6 // ep), dp, ep)
        assert replicas <= set(own) and (fully or replicas == set(own))
        alike = 1 if fully else len(own)
        assert (count == (tp if parameter.shard is None else 1) * alike).all(), parameter.name
    mesh = sharding.mesh
    fully_over = mesh.dp if sharding.fully else 1
    assert max(held.values()) == stage_elements(MOE, mesh.pp, mesh.tp, sharding.ep, fully_over)


@pytest.mark.parametrize(
    ("pp", "dp", "cp", "tp", "ep", "fully"),
    [(1, 1, 1, 2, 2, False), (2, 3, 1, 2, 6, False), (1, 2, 2, 3, 6, False), (1, 4, 1, 3, 3, True)],
)
def test_whole_experts_lie_on_neighbours(pp: int, dp: int, cp: int, tp: int, ep: int, fully: bool) -> None:
    """Device d of a stage has the experts of part d mod ep, and tp cuts none of their matrices: with
    Megatron-core's `expert_tensor_parallel_size: 1` ranks are in the order ep-dp-pp, of stages that tp-cp-dp
    fills."""
    mesh = Mesh.of(tuple(range(pp * dp * cp * tp)), pp=pp, dp=dp, cp=cp, tp=tp)
    sharding, stage = Sharding(mesh, ep, fully, whole_experts=True), dp * cp * tp
    held = dict.fromkeys(mesh.devices, 0)
    for parameter in parameters(MOE):
        boxes = weight_boxes(MOE, sharding, parameter)
        for device, box in boxes.items():
            held[device] += volume(box)
        if parameter.expert is None:
            assert boxes == weight_boxes(MOE, Sharding(mesh, fully=fully), parameter)
            continue
        assert {device % stage % ep for device in boxes} == {parameter.expert // (6 // ep)}
        if not fully:
            assert set(boxes.values()) == {tuple((0, size) for size in parameter.shape)}
        assert sum(map(volume, boxes.values())) == parameter.size * (1 if fully else stage // ep)
    how = dp if fully else 1, frozenset[str](), 1, True
    assert max(held.values()) == stage_elements(MOE, pp, tp, ep, *how)


@pytest.mark.parametrize(
    ("pp", "dp", "cp", "tp", "ep", "whole"),
    [
        (1, 4, 1, 1, 2, False),
        (1, 2, 2, 1, 2, False),
        (1, 4, 2, 1, 2, False),
        (2, 4, 3, 2, 2, False),
        (2, 4, 3, 2, 2, True),
        (2, 4, 3, 2, 6, True),
    ],
)
def test_ranks_that_hold_the_same_experts(pp: int, dp: int, cp: int, tp: int, ep: int, whole: bool) -> None:
    """They are all that hold a box of one; and those that share experts hold each expert of a layer once."""
    mesh = Mesh.of(tuple(range(pp * dp * cp * tp)), pp=pp, dp=dp, cp=cp, tp=tp)
    sharding = Sharding(mesh, ep, whole_experts=whole)
    found, holders = set[tuple[int, ...]](), dict.fromkeys(sharding.mesh.devices, 0)
    for parameter in (p for p in parameters(MOE) if p.expert is not None):
        by_box: dict[object, list[int]] = {}
        for device, box in weight_boxes(MOE, sharding, parameter).items():
            by_box.setdefault(box, []).append(device)
            holders[device] += volume(box)
        found |= {tuple(devices) for devices in by_box.values()}
    assert found == set(sharding.expert_replicas)
    all_experts = sum(p.size for p in parameters(MOE) if p.expert is not None) // (pp * sharding.expert_tp)
    assert {sum(holders[device] for device in peers) for peers in sharding.expert_peers} == {all_experts}


def test_elements_without_experts_of_others() -> None:
    """Qwen3-30B-A3B (its config.json): of what its experts hold a rank of ep 8 lacks seven eighths."""
    shape = NAMED_SHAPES["qwen3-30b-a3b"]
    experts = 48 * 128 * 3 * 2048 * 768
    assert stage_elements(shape, 1, 1) - stage_elements(shape, 1, 1, ep=8) == experts * 7 // 8


def test_paper_example_groups() -> None:
    """Section 5.3: 1-4-2 -> 1-2-2-2 makes generation groups [G1,G3],[G2,G4],[G5,G7],[G6,G8]."""
    train = Mesh.of(tuple(range(1, 9)), pp=1, dp=2, tp=4)
    generate = generation_mesh(train, 2)
    assert generate and generate.groups("tp") == ((1, 3), (2, 4), (5, 7), (6, 8))


def test_groups_over_pipeline_stages() -> None:
    """2-4-1 -> 1-2-4-1 by section 5.3's rule: ranks that are t / t_g apart generate together. 4-2-1 ->
    2-2-2-1: a stage of generation has the layers of two of training; each replica has one rank of either."""
    one = generation_mesh(Mesh.of(tuple(range(1, 9)), pp=2, tp=4), 2)
    assert one and one.groups("tp") == ((1, 3), (2, 4), (5, 7), (6, 8))
    two = generation_mesh(Mesh.of(tuple(range(1, 9)), pp=4, tp=2), 2, pp=2)
    assert two and two.groups("tp", "pp") == ((1, 2, 5, 6), (3, 4, 7, 8))


def test_sizes_that_do_not_nest() -> None:
    train = Mesh.of(tuple(range(24)), pp=2, dp=2, tp=6)
    assert generation_mesh(train, 4) is None
    assert generation_mesh(train, 3, pp=3) is None
    assert generation_mesh(train, 12) is None


def test_natural_order_would_move_more() -> None:
    """Without regrouping, 1-4-2 -> 1-2-4 receives more on some device (HybridFlow-V's layout)."""
    train = Mesh.of(tuple(range(8)), dp=2, tp=4)
    regrouped, natural = generation_mesh(train, 2), Mesh.of(tuple(range(8)), dp=4, tp=2)
    assert regrouped
    source, targets = Sharding(train), map(Sharding, (regrouped, natural))
    ours, theirs = (lower_weights(SHAPE, "f32", source, target, CLUSTER) for target in targets)
    assert ours.bytes_per_device == ours.lower_bound_bytes_per_device < theirs.bytes_per_device


def test_equal_meshes_share_weights() -> None:
    mesh = Mesh.of((0, 1), dp=2)
    lowered = lower_weights(SHAPE, "f32", Sharding(mesh), Sharding(mesh), CLUSTER, shared=True)
    assert (lowered.collective, lowered.copies, lowered.bytes_per_device) == ("alias", (), 0)
    assert lowered.peak_bytes == 4 * num_parameters(SHAPE)
