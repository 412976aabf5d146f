"""Lowering is checked on numpy arrays: what the copies do, not how they were found."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.plan.layout import Layout, Mesh, Only, Replicate, Shard, volume
from hflow.plan.reshard import Boxes, lower, lower_bound, received, recognise

SHAPE = (24, 12)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of a 24 x 12 value on a mesh of up to 8 of 8 devices, in any device order."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=3).filter(lambda s: prod(s) <= 8))
    devices = draw(st.permutations(range(8)))[: prod(sizes)]
    placements = tuple(draw(_placement(size)) for size in sizes)
    return Layout(Mesh(tuple(devices), tuple((f"a{i}", s) for i, s in enumerate(sizes))), placements)


def _placement(size: int) -> st.SearchStrategy[Shard | Replicate | Only]:
    only = st.integers(0, size - 1).map(Only)
    return st.one_of(st.sampled_from((0, 1)).map(Shard), st.just(Replicate()), only)


def place(boxes: Boxes, whole: np.ndarray) -> dict[int, np.ndarray]:
    """Every device's memory: its box filled, all else unknown (nan)."""
    memory: dict[int, np.ndarray] = {}
    for device, box in boxes.items():
        memory[device] = np.full(SHAPE, np.nan)
        index = tuple(slice(*span) for span in box)
        memory[device][index] = whole[index]
    return memory


def run(copies, memory: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Perform copies on simulated memories; reading what a device lacks yields nan."""
    after = {d: m.copy() for d, m in memory.items()}
    for phase in (0, 1):
        before = {d: m.copy() for d, m in after.items()}
        for copy in (c for c in copies if c.phase == phase):
            index = tuple(slice(*span) for span in copy.box)
            target = after.setdefault(copy.target, np.full(SHAPE, np.nan))
            assert np.isnan(target[index]).all(), "an element arrived twice"
            target[index] = before[copy.source][index]
    return after


HOSTS = st.sampled_from((1, 2, 4, 8))  # devices per host
SPANS = [st.tuples(*2 * [st.integers(0, size)]).map(lambda ends: (min(ends), max(ends))) for size in SHAPE]
BOXES = st.dictionaries(st.integers(0, 7), st.tuples(*SPANS), min_size=1)


@settings(max_examples=300, deadline=None)
@given(layouts(), layouts(), HOSTS)
def test_any_layout_to_any_other(source: Layout, target: Layout, per_host: int) -> None:
    check(source.boxes(SHAPE), target.boxes(SHAPE), per_host)


@settings(max_examples=300, deadline=None)
@given(BOXES, BOXES, HOSTS)
def test_any_boxes_to_any_other(held: Boxes, needed: Boxes, per_host: int) -> None:
    """Boxes that overlap as no layout's do, some of them empty."""
    check(held, needed, per_host)


def check(held: Boxes, needed: Boxes, per_host: int) -> None:
    """Every needed element arrives once, unless its device has it; what nobody holds is refused."""
    whole = np.arange(prod(SHAPE), dtype=float).reshape(SHAPE)
    covered = np.zeros(SHAPE, bool)
    for box in held.values():
        covered[tuple(slice(*span) for span in box)] = True
    if not all(covered[tuple(slice(*s) for s in b)].all() for b in needed.values()):
        with pytest.raises(ValueError, match="no device holds"):
            lower(held, needed)
        return
    copies = lower(held, needed, lambda d: d // per_host)
    after = run(copies, place(held, whole))
    for device, box in needed.items():
        index = tuple(slice(*span) for span in box)
        if whole[index].size:
            assert np.array_equal(after[device][index], whole[index])
    got = received(copies)
    assert {d: n for d, n in lower_bound(held, needed).items() if n} == got


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_to_itself_nothing_moves(layout: Layout) -> None:
    boxes = layout.boxes(SHAPE)
    assert lower(boxes, boxes) == ()
    assert recognise((), boxes, boxes) == "alias"


@settings(max_examples=100, deadline=None)
@given(layouts(), layouts(), st.sampled_from((2, 4)))
def test_one_copy_per_host(source: Layout, target: Layout, per_host: int) -> None:
    """A cell enters a host at most once, and only if no device of the host holds it."""
    held, needed = source.boxes(SHAPE), target.boxes(SHAPE)
    try:
        copies = lower(held, needed, lambda d: d // per_host)
    except ValueError:
        return
    entered: dict[int, np.ndarray] = {}
    for copy in copies:
        host = copy.target // per_host
        if copy.source // per_host == host:
            continue
        seen = entered.setdefault(host, np.zeros(SHAPE, bool))
        index = tuple(slice(*span) for span in copy.box)
        assert not seen[index].any()
        seen[index] = True
        for device, box in held.items():
            inside = np.zeros(SHAPE, bool)
            inside[tuple(slice(*span) for span in box)] = True
            assert device // per_host != host or not inside[index].any()


def _rows(mesh: Mesh, *placements: Shard | Replicate | Only) -> Boxes:
    return Layout(mesh, placements).boxes((8,))


LINE, PAIRS = Mesh((0, 1, 2, 3), (("dp", 4),)), Mesh((0, 1, 2, 3), (("dp", 2), ("tp", 2)))
FAR = Mesh((4, 5, 6, 7), (("dp", 4),))


@pytest.mark.parametrize(
    ("source", "target", "collective"),
    [
        (_rows(LINE, Shard(0)), _rows(LINE, Shard(0)), "alias"),
        (_rows(LINE, Replicate()), _rows(LINE, Shard(0)), "alias"),
        (_rows(LINE, Shard(0)), _rows(LINE, Replicate()), "all_gather"),
        (_rows(LINE, Shard(0)), _rows(PAIRS, Shard(0), Replicate()), "all_gather"),
        (_rows(LINE, Only(0)), _rows(LINE, Replicate()), "broadcast"),
        (_rows(LINE, Only(0)), _rows(LINE, Shard(0)), "scatter"),
        (_rows(LINE, Shard(0)), _rows(LINE, Only(2)), "gather"),
        (_rows(LINE, Shard(0)), _rows(FAR, Replicate()), "p2p"),
    ],
)
def test_collectives_are_recognised(source: Boxes, target: Boxes, collective: str) -> None:
    assert recognise(lower(source, target), source, target) == collective


def test_transpose_is_all_to_all() -> None:
    rows, columns = (Layout(LINE, (Shard(dim),)).boxes((8, 8)) for dim in (0, 1))
    copies = lower(rows, columns)
    assert recognise(copies, rows, columns) == "all_to_all"
    assert all(volume(c.box) == 4 for c in copies) and len(copies) == 12


def test_holders_take_turns() -> None:
    """Four replicas feed four receivers: nobody sends twice."""
    copies = lower(_rows(LINE, Replicate()), _rows(FAR, Replicate()))
    assert sorted(c.source for c in copies) == [0, 1, 2, 3]
