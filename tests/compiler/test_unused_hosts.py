"""Rows without the unused hosts between them, against what moves between the rows themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hflow.compiler.planner.unused_hosts import unused_before
from hflow.cost.redistribution import weights_s
from hflow.plan.cluster import HostGroup
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.sharding import Sharding
from tests.cost.test_redistribution import a100s

CLUSTER, DENSE = a100s(6, 4), NAMED_SHAPES["qwen3-0.6b"]
Row = tuple[int, ...]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    count = draw(st.sampled_from((1, 2, 4, 8)))
    first = draw(st.integers(0, CLUSTER.num_devices - count))
    return tuple(range(first, first + count))


@given(source=rows(), target=rows(), tp=st.sampled_from((1, 2, 4)))
def test_weights_take_as_long_without_unused_hosts(source: Row, target: Row, tp: int) -> None:
    before = unused_before(CLUSTER, (source, target))
    moved = [tuple(device - unused for device in row) for row, unused in zip((source, target), before)]
    there, here = (
        weights_s(DENSE, "bf16", _over(one, len(one)), _over(other, min(tp, len(other))), CLUSTER)
        for one, other in ((source, target), moved)
    )
    assert here == pytest.approx(there, rel=1e-12)


def _over(row: Row, tp: int) -> Sharding:
    return Sharding(Mesh.of(row, dp=len(row) // tp, tp=tp))


@given(every=st.lists(rows(), min_size=1, max_size=3))
@example(every=[tuple(range(2, 10)), (4, 5), (16, 17)])  # one within another, and one behind both
def test_hosts_that_are_used_follow_each_other(every: list[Row]) -> None:
    """In their order, and rows lie on them as before."""
    before = unused_before(CLUSTER, every)
    assert all(unused % 4 == 0 for unused in before)
    used = sorted({device // 4 for row in every for device in row})
    new = [{(device - unused) // 4 for device in row} for row, unused in zip(every, before)]
    assert new == [{used.index(device // 4) for device in row} for row in every]


def test_hosts_that_differ_are_all_counted() -> None:
    mixed = replace(CLUSTER, more=(HostGroup(CLUSTER.device, 2, 8),))
    assert unused_before(mixed, ((8, 9), (32, 33))) == [0, 0]
