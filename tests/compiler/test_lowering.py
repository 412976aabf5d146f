"""Lowered weight edges: Table 2 of HybridFlow (arXiv:2409.19256) over all divisors, and what the copies of
any two shardings do to numpy arrays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.compiler.lowering import Lowered, lower_rows, lower_weights
from hflow.compiler.regroup import generation_mesh
from hflow.graph.types import Dim, Factor, ValueType
from hflow.plan.cluster import Cluster, DeviceKind, Link
from hflow.plan.edges import CopySet
from hflow.plan.layout import Box, Mesh, intersect, volume
from hflow.plan.model_shape import Experts, ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import Parameter, parameters, weight_boxes
from hflow.plan.sharding import Sharding, spreads
from tests.layouts import rows_layout

# 64 layers, heads, rows and columns of the matrices in layers: whatever divides 64 divides them evenly.
EVEN = ModelShape("llama", 64, 64, 64, 64, 1, 64, 128, 64, 1e4, 1e-6, False, False)
MOE = ModelShape(
    "qwen3_moe", 4, 8, 4, 4, 2, 8, 8, 64, 1e4, 1e-6, False, False, qk_norm=True, moe=Experts(4, 2, 4)
)
TIED = ModelShape("qwen2", 4, 8, 4, 4, 2, 8, 8, 64, 1e4, 1e-6, True, True)
# Fewer key-value heads than ranks of tp, of which several then hold the same.
PAIRS = ModelShape("qwen2", 4, 8, 4, 2, 2, 8, 8, 64, 1e4, 1e-6, False, True)
PAIR = replace(PAIRS, num_kv_heads=1, tied=True)
KIND = DeviceKind("A100", "cuda", 312e12, 80 * 10**9, 2e12, 0.5, 0.0)


def cluster(per_host: int, devices: int = 64) -> Cluster:
    return Cluster("test", KIND, devices // per_host, per_host, Link(300e9, 1e-5), Link(25e9, 1e-5))


POWERS = [2**i for i in range(7)]
SIZES = [(p, t, d) for p, t, d in product(POWERS, repeat=3) if p * t * d <= 64]


@pytest.mark.slow
@pytest.mark.parametrize(("p", "t", "d"), SIZES)
def test_regrouping_reaches_table_2(p: int, t: int, d: int) -> None:
    """For every (p, t, d) -> (p_g, t_g, d_g·d), of the tp-split weights of the layers: a device receives
    (d_g - 1)/(t p) of them and ends with 1/(t_g p_g), in which lies what it had (redundancy 0); and a host of
    eight devices receives what one of its devices needs and none of them holds, once."""
    train = Mesh.of(tuple(range(p * d * t)), pp=p, dp=d, tp=t)
    alike: dict[tuple[int, int], list[Parameter]] = defaultdict(list)  # by training stage and split dim
    for parameter in parameters(EVEN):
        if parameter.layer is not None and parameter.shard is not None:
            alike[parameter.layer * p // 64, parameter.shard].append(parameter)
    names = {q.name: q.size for same in alike.values() for q in same}
    for p_g, t_g in product([x for x in POWERS if p % x == 0], [x for x in POWERS if t % x == 0]):
        generate, d_g = generation_mesh(train, t_g, p_g), p * t // (p_g * t_g)
        assert generate and (generate.pp, generate.tp, generate.dp) == (p_g, t_g, d * d_g)
        lowered = lower_weights(EVEN, "bf16", Sharding(train), Sharding(generate), cluster(8))
        got, entered = received([s for s in lowered.copies if s.tensors[0] in names])
        model = sum(names.values())
        assert {Fraction(got[device], model) for device in train.devices} == {Fraction(d_g - 1, t * p)}
        kept, entering = Counter[int](), Counter[int]()
        for (_, dim), same in alike.items():
            held, needed = (weight_boxes(EVEN, Sharding(m), same[0]) for m in (train, generate))
            assert all(intersect(needed[device], box) == box for device, box in held.items())
            kept.update({device: volume(box) * len(same) for device, box in needed.items()})
            rows = host_bits(needed, dim), host_bits(held, dim)
            lacking = {host: bits & ~rows[1][host] for host, bits in rows[0].items()}
            entering.update({host: bits.bit_count() * 64 * len(same) for host, bits in lacking.items()})
        assert {Fraction(kept[device], model) for device in train.devices} == {Fraction(1, t_g * p_g)}
        assert entered == +entering


def received(sets: Iterable[CopySet]) -> tuple[Counter[int], Counter[int]]:
    """Elements that each device receives, and each host of eight from others."""
    got, entered = Counter[int](), Counter[int]()
    for copy_set in sets:
        for copy in copy_set.copies:
            size = volume(copy.box) * len(copy_set.tensors)
            got[copy.target] += size
            if copy.source // 8 != copy.target // 8:
                entered[copy.target // 8] += size
    return got, entered


def host_bits(boxes: Mapping[int, Box], dim: int) -> dict[int, int]:
    """What the devices of each host of eight hold together: the indices along `dim`, as bits."""
    bits: dict[int, int] = defaultdict(int)
    for device, box in boxes.items():
        start, stop = box[dim]
        bits[device // 8] |= (1 << stop) - (1 << start)
    return bits


@st.composite
def shardings(draw: st.DrawFn, shape: ModelShape) -> Sharding:
    """Any sharding on up to 12 of 16 devices, in any order: two of them may be equal, nested or disjoint."""
    axes = (1, 2, 3), (1, 2, 3, 4, 6), (1, 2, 4)
    sizes = st.tuples(*map(st.sampled_from, axes))
    pp, dp, tp = draw(sizes.filter(lambda s: prod(s) <= 12))
    devices = draw(st.one_of(st.just(range(16)), st.just(range(15, -1, -1)), st.permutations(range(16))))
    mesh, vpp = Mesh.of(tuple(devices[: prod((pp, dp, tp))]), pp, dp, tp), draw(st.sampled_from((1, 2)))
    ways = [way for way in product((1, 2, 4), (False, True)) if shape.moe and spreads(mesh, *way)]
    ep, whole = draw(st.sampled_from(ways or [(1, False)]))
    vpp = vpp if pp == 2 else 1  # three stages have 1, 2 and 1 layers
    return Sharding(mesh, ep, draw(st.booleans()), vpp=vpp, whole_experts=whole)


Memory = dict[tuple[int, str], np.ndarray]  # what a device has of a parameter; the rest is not a number


def filled(shape: ModelShape, sharding: Sharding) -> Memory:
    """Every device holds its boxes; each element of the model is a number of its own."""
    memory: Memory = {}
    first = 0.0
    for parameter in parameters(shape):
        whole = np.arange(first, first + parameter.size).reshape(parameter.shape)
        first += parameter.size
        for device, box in weight_boxes(shape, sharding, parameter).items():
            index = tuple(slice(*span) for span in box)
            memory[device, parameter.name] = np.full(parameter.shape, np.nan)
            memory[device, parameter.name][index] = whole[index]
    return memory


def run(lowered: Lowered, held: Memory, wanted: Memory) -> Memory:
    """Perform the copies: readers start with what their devices hold of their boxes. Copies of phase 0 read
    from the holders, those of phase 1 what their sender received."""
    new: Memory = {}
    for key, array in wanted.items():
        new[key] = np.where(np.isnan(array), np.nan, held.get(key, np.full_like(array, np.nan)))
    for phase in (0, 1):
        for copy_set, name in ((s, name) for s in lowered.copies for name in s.tensors):
            for copy in (c for c in copy_set.copies if c.phase == phase):
                index = tuple(slice(*span) for span in copy.box)
                assert np.isnan(new[copy.target, name][index]).all(), "an element arrived twice"
                sent = (new if phase else held)[copy.source, name][index]
                assert not np.isnan(sent).any(), "the sender lacks what it sends"
                new[copy.target, name][index] = sent
    return new


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MOE, TIED, PAIRS, PAIR], ids=["moe", "tied", "two pairs", "one pair"])
@settings(max_examples=80, deadline=None)
@given(data=st.data(), per_host=st.sampled_from((1, 2, 4, 16)))
def test_there_and_back(shape: ModelShape, data: st.DataObject, per_host: int) -> None:
    """Between any two shardings every element that a device lacks arrives once and is the right one; no
    device and no host receives more than that; the way back gives what was there before."""
    ends = data.draw(st.tuples(shardings(shape), shardings(shape)))
    memories = [filled(shape, end) for end in ends]
    for (source, held), (target, needed) in permutations(zip(ends, memories)):
        lowered = lower_weights(shape, "f32", source, target, cluster(per_host, 16))
        after = run(lowered, held, needed)
        assert all(np.array_equal(after[key], array, equal_nan=True) for key, array in needed.items())
        assert after.keys() == needed.keys()
        bound, room, entering = bounds(held, needed, per_host)
        assert lowered.bytes_per_device == lowered.lower_bound_bytes_per_device == 4 * max(bound.values())
        assert lowered.peak_bytes == 4 * max(room.values())
        assert entering == sum(
            volume(c.box) * len(s.tensors)
            for s in lowered.copies
            for c in s.copies
            if c.source // per_host != c.target // per_host
        )


def bounds(held: Memory, needed: Memory, per_host: int) -> tuple[Counter[int], Counter[int], int]:
    """By counting elements: what each device lacks; what it holds before and after together; and what all
    hosts lack, each counted once."""
    lacks, room = Counter[int](), Counter[int]()
    inside: dict[tuple[int, str], np.ndarray] = {}
    wanted: dict[tuple[int, str], np.ndarray] = {}
    for memory, by_host in ((held, inside), (needed, wanted)):
        for (device, name), array in memory.items():
            here = ~np.isnan(array)
            room[device] += int(here.sum())
            key = device // per_host, name
            by_host[key] = here | by_host.get(key, False)
    for key, array in needed.items():
        lacks[key[0]] += int((~np.isnan(array) & np.isnan(held.get(key, np.full_like(array, np.nan)))).sum())
    return lacks, room, sum(int((here & ~inside.get(key, False)).sum()) for key, here in wanted.items())


def test_devices_take_turns_over_parameters() -> None:
    """Eight equal devices feed three hosts with parameters of three shapes: nine copies leave, by all eight,
    and no device of a host brings in two of them, though each parameter alone could go by the same."""
    train, read = Mesh.of(tuple(range(8)), dp=8), Mesh.of(tuple(range(8, 32)), dp=24)
    lowered = lower_weights(EVEN, "bf16", Sharding(train), Sharding(read), cluster(8, 32))
    entering = [c for s in lowered.copies for c in s.copies if c.phase == 0]
    assert {c.source for c in entering} == set(train.devices)
    assert len({c.target for c in entering}) == len(entering) == 9


def test_rows_between_large_meshes() -> None:
    """1,024 replicas to 512 of two devices: each device lacks the rows of its neighbour."""
    rows = ValueType("i32", (Dim((Factor("batch", 4096, "prompts"),)),))
    wide, narrow = Mesh.of(tuple(range(1024)), dp=1024), Mesh.of(tuple(range(1024)), dp=512, tp=2)
    lowered = lower_rows((rows,), rows_layout(wide), rows_layout(narrow), cluster(8, 1024))
    pairs = {(c.source, c.target) for s in lowered.copies for c in s.copies}
    assert pairs == {(device, device ^ 1) for device in range(1024)}
    assert (lowered.collective, lowered.bytes_per_device) == ("all_gather", 4 * 4)


def on(devices: Iterable[int], pp: int = 1, dp: int = 1, tp: int = 1) -> Mesh:
    return Mesh.of(tuple(devices), pp=pp, dp=dp, tp=tp)


LARGE = on(range(128), pp=8, dp=2, tp=8)
WHOLE = Sharding(on(range(32), dp=8, tp=4), 16, whole_experts=True)
PRICED = [
    ("llama-7b", Sharding(on(range(16), dp=2, tp=8)), Sharding(on(range(16), dp=8, tp=2))),
    ("llama-70b", Sharding(LARGE), Sharding(generation_mesh(LARGE, 8) or LARGE)),
    ("llama-70b", Sharding(LARGE), Sharding(generation_mesh(LARGE, 8, pp=2) or LARGE)),
    ("llama-70b", Sharding(LARGE, vpp=2), Sharding(LARGE)),
    ("llama-70b", Sharding(on(range(64), 4, 2, 8)), Sharding(on(range(64, 96), 1, 4, 8))),
    ("llama-13b", Sharding(on(range(32), dp=32), fully=True), Sharding(on(range(32), dp=8, tp=4))),
    ("qwen3-30b-a3b", Sharding(on(range(32), 2, 8, 2), ep=8), Sharding(on(range(32), dp=8, tp=4))),
    ("qwen3-30b-a3b", Sharding(on(range(32), dp=32), 8, True), Sharding(on(range(32), dp=16, tp=2), 4)),
    ("qwen2.5-3b", Sharding(on(range(16), dp=2, tp=8)), Sharding(on(range(16), dp=8, tp=2))),
    ("qwen2.5-3b", Sharding(on(range(16), dp=8, tp=2)), Sharding(on(range(16, 32), dp=2, tp=8))),
    ("qwen3-30b-a3b", Sharding(on(range(32), 2, 8, 2), ep=8), Sharding(on(range(32), dp=4, tp=8))),
    ("qwen3-30b-a3b", WHOLE, Sharding(on(range(32), dp=8, tp=4))),
    ("qwen3-30b-a3b", WHOLE, Sharding(on(range(32), dp=4, tp=8), 8, whole_experts=True)),
    ("qwen3-30b-a3b", Sharding(on(range(32), dp=8, tp=4)), WHOLE),
]


@pytest.mark.parametrize(("name", "source", "target"), PRICED)
def test_copies_take_as_long_as_predicted(name: str, source: Sharding, target: Sharding) -> None:
    """The price, a bound made without copies, is what these copies take: the busiest device through 80 % of
    its 300 GB/s, in or out, then the busiest host through 80 % of its 25 GB/s. It counts all layers as equal,
    which the embedding and the head are not: up to 3 %."""
    lowered = lower_weights(NAMED_SHAPES[name], "bf16", source, target, cluster(8, 128))
    device, host = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for copy_set in lowered.copies:
        for copy in copy_set.copies:
            size = 2 * volume(copy.box) * len(copy_set.tensors)
            for way, end in (("out", copy.source), ("in", copy.target)):
                device[way, end] += size
                host[way, end // 8] += size * (copy.source // 8 != copy.target // 8)
    seconds = max(device.values()) / 240e9 + max(host.values()) / 20e9
    assert lowered.time_s == pytest.approx(seconds, rel=0.03)
