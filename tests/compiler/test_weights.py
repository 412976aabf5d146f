"""Weight layouts and HybridFlow's zero-redundancy regrouping (arXiv:2409.19256, Table 2)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from hflow.compiler.cluster import Cluster, DeviceKind, Link
from hflow.compiler.layout import Mesh, volume
from hflow.compiler.lowering import lower_weights
from hflow.compiler.regroup import generation_mesh
from hflow.compiler.reshard import contains, lower, lower_bound, received
from hflow.compiler.shape import Experts, Family, ModelShape
from hflow.compiler.sharding import Sharding
from hflow.compiler.weights import parameters, stage_elements, weight_boxes

SHAPE = ModelShape("qwen2", 4, 64, 8, 4, 8, 96, 32, 128, 1e4, 1e-6, False, True)
TIED = ModelShape("llama", 4, 64, 8, 4, 8, 96, 32, 128, 1e4, 1e-6, True, False)
MOE = ModelShape(
    "qwen3_moe", 4, 64, 8, 4, 16, 48, 32, 128, 1e4, 1e-6, False, False, qk_norm=True, moe=Experts(6, 2, 24)
)
LINK = Link(1e9, 1e-4)
CLUSTER = Cluster("test", DeviceKind("cpu", "cpu", 1e11, 4 * 10**9, 1e10, 0.5, 1e-4), 1, 8, LINK, LINK)
DIVISORS = (1, 2, 4)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_transformers(family: Family, tied: bool) -> None:
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
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())


def test_experts_are_listed_as_in_published_files() -> None:
    """The names of Qwen/Qwen3-30B-A3B: a router, and three matrices for every expert, split over tp."""
    found = {p.name: p for p in parameters(MOE) if p.name.startswith("model.layers.3.mlp.")}
    at = "model.layers.3.mlp."
    assert found.pop(f"{at}gate.weight").shape == (6, 64)
    assert len(found) == 6 * 3
    down, up = found[f"{at}experts.5.down_proj.weight"], found[f"{at}experts.5.up_proj.weight"]
    assert (up.shape, up.shard, down.shape, down.shard) == ((24, 64), 0, (64, 24), 1)
    assert stage_elements(MOE, 1, 1) == MOE.num_parameters


@pytest.mark.parametrize("shape", [SHAPE, TIED, MOE])
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
        assert (count == copies).all(), parameter.name
    assert max(held.values()) == stage_elements(shape, pp, tp)


@pytest.mark.parametrize("pp", DIVISORS)
@pytest.mark.parametrize("tp", DIVISORS)
@pytest.mark.parametrize("dp", (1, 2))
def test_regrouping_reaches_table_2(pp: int, tp: int, dp: int) -> None:
    """For every (p, t, d) -> (1, t_g, ·): each training box lies inside its generation box, so what
    arrives of a tp-split layer parameter is (d_g - 1)/(t p) of all layers, and nothing is held twice."""
    train = Mesh.of(tuple(range(pp * dp * tp)), pp=pp, dp=dp, tp=tp)
    for tp_g in (t for t in DIVISORS if tp % t == 0):
        generate = generation_mesh(train, tp_g)
        assert generate and set(generate.devices) == set(train.devices)
        assert (generate.tp, generate.dp) == (tp_g, dp * pp * tp // tp_g)
        total = received_total = 0
        for parameter in (p for p in parameters(SHAPE) if p.layer is not None and p.shard is not None):
            held, needed = (weight_boxes(SHAPE, Sharding(m), parameter) for m in (train, generate))
            assert all(contains(needed[d], held[d]) for d in held)
            copies = lower(held, needed)
            assert received(copies) == {d: n for d, n in lower_bound(held, needed).items() if n}
            total += parameter.size
            received_total += received(copies).get(0, 0)
        micro = pp * tp // tp_g  # HybridFlow's d_g
        assert Fraction(received_total, total) == Fraction(micro - 1, tp * pp)


def test_paper_example_groups() -> None:
    """Section 5.3: 1-4-2 -> 1-2-2-2 makes generation groups [G1,G3],[G2,G4],[G5,G7],[G6,G8]."""
    train = Mesh.of(tuple(range(1, 9)), pp=1, dp=2, tp=4)
    generate = generation_mesh(train, 2)
    assert generate and generate.groups("tp") == ((1, 3), (2, 4), (5, 7), (6, 8))


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
    assert lowered.peak_bytes == 4 * SHAPE.num_parameters
