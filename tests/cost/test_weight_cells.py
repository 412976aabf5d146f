"""Weights' cells told by layers, experts and slices apart, against single cells of all devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.cost.redistribution import Cells, redistribution_s, weight_bytes, weights_s
from hflow.cost.weight_cells import Grid, blocks, grid_of, includes
from hflow.plan.cluster import Cluster, HostGroup
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.sharding import Sharding, spreads
from hflow.plan.strategy import Strategy
from tests.cost.test_redistribution import a100s

DENSE, EXPERTS = NAMED_SHAPES["qwen3-0.6b"], NAMED_SHAPES["qwen3-30b-a3b"]
MIXED = replace(a100s(2, 6), more=(HostGroup(a100s(1, 1).device, 2, 4),))
CLUSTERS = (a100s(2, 8), a100s(4, 4), a100s(3, 6), MIXED)


@st.composite
def shardings(draw: st.DrawFn, cluster: Cluster, experts: bool) -> Sharding:
    """On consecutive devices; stages may have unequal numbers of layers."""
    sizes = [
        each for each in product((1, 2, 3, 5), (1, 2, 4), (1, 2, 4)) if _num(each) <= cluster.num_devices
    ]
    pp, dp, tp = draw(st.sampled_from(sizes))
    first = draw(st.integers(0, cluster.num_devices - pp * dp * tp))
    mesh = Mesh.of(tuple(range(first, first + pp * dp * tp)), pp=pp, dp=dp, tp=tp)
    zero = draw(st.sampled_from((0, 3)))
    ways = [way for way in product((1, 2, 4, 8), (False, True)) if experts and spreads(mesh, *way)]
    ep, whole = draw(st.sampled_from(ways or [(1, False)]))
    return Sharding.of(mesh, Strategy(zero=zero, ep=ep, whole_experts=whole))


def _num(sizes: tuple[int, int, int]) -> int:
    pp, dp, tp = sizes
    return pp * dp * tp


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_they_say_what_single_cells_say(shape: object, data: st.DataObject) -> None:
    """What moves, how long it takes, and whether the one includes the other."""
    shape, cluster = EXPERTS if shape is EXPERTS else DENSE, data.draw(st.sampled_from(CLUSTERS))
    source, target = (data.draw(shardings(cluster, shape is EXPERTS)) for _ in range(2))
    size, of_experts = weight_bytes(shape, "bf16")
    parts = [(size - of_experts, 1)]
    if of_experts:
        parts.append((of_experts, lcm(source.ep, target.ep)))
    by_cell, included = 0.0, True
    for moved, experts in parts:
        grid = grid_of(source, target, shape.num_layers, experts)
        held, needed = (_cells(end, shape.num_layers, grid) for end in (source, target))
        ends = Cells.on(cluster, held), Cells.on(cluster, needed)
        by_cell += redistribution_s(*ends, moved / grid.size, cluster)
        included &= all(not mask & ~held.get(device, 0) for device, mask in needed.items())
    assert includes(source, target, shape.num_layers) == included
    expected = 0.0 if source == target else by_cell
    assert weights_s(shape, "bf16", source, target, cluster) == pytest.approx(expected, rel=1e-9)


def _cells(sharding: Sharding, num_layers: int, grid: Grid) -> dict[int, int]:
    """Each device's cells, one bit each."""
    own = blocks(sharding, num_layers, grid)
    found = dict.fromkeys(own.of_device, 0)
    for device, number in own.of_device.items():
        each = zip(own.distinct[number], grid)
        taken = product(*([n for n in range(count) if bits >> n & 1] for bits, count in each))
        for layer, expert, part in taken:
            found[device] |= 1 << ((layer * grid.experts + expert) * grid.slices + part)
    return found
