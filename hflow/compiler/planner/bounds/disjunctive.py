"""Which of two jobs on the same devices is first, where the other order would take too long.

A device does one job at a time, so of two the one or the other is first. Where one order takes the limit
or more, the other is certain; what follows from it makes more orders certain (immediate selection, Carlier
and Pinson 1989). Transfers between sets of devices are jobs of both, however short they are: a set that does
something long instead keeps the other waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from hflow.compiler.planner.bounds.cross_mesh import CrossMeshTransfer
from hflow.compiler.planner.bounds.numbers import Bools, Floats, Ints, one_machines_s

PASSES = 4  # more of them seldom find more
SecondsByNode = Mapping[str, Floats]  # by node, for each choice
Arc = tuple[int, int]  # numbers of two jobs, of which the one is before the other


@dataclass(frozen=True)
class Jobs:
    """Nodes in topological order, then transfers. `arcs`: which are before which, without those that follow
    from others; `open`: pairs on common devices of which either may be first; `on`: the jobs of each set of
    devices. `firsts`, `lasts`: those on one set that are before, or after, a transfer."""

    names: tuple[str, ...]
    cross_mesh_transfers: tuple[CrossMeshTransfer, ...]
    arcs: tuple[Arc, ...]
    open: tuple[Arc, ...]
    on: tuple[tuple[int, ...], ...]
    firsts: tuple[tuple[int, tuple[int, ...]], ...]
    lasts: tuple[tuple[int, tuple[int, ...]], ...]


def jobs_of(
    names: Sequence[str],
    before: Mapping[str, Collection[str]],
    places: Mapping[str, tuple[int, ...]],
    cross_mesh_transfers: Sequence[CrossMeshTransfer],
    whole: Collection[str],
) -> Jobs:
    """Nodes in topological order, of which `before` tells all that come before them, and `whole` those that
    run in one piece."""
    number = {name: i for i, name in enumerate(names)}
    arcs = {(number[b], number[n]) for n in names for b in before[n] if b in number}
    rank = {i: float(i) for i in range(len(names))}
    for i, transfer in enumerate(cross_mesh_transfers, len(names)):
        arcs |= {(number[n], i) for n in transfer.after} | {(i, number[n]) for n in transfer.before}
        rank[i] = max(number[n] for n in transfer.after) + 0.5
    devices = [*(frozenset(places[name]) for name in names), *(m.devices for m in cross_mesh_transfers)]
    nodes = [number[n] for n in names if n in whole]
    met = range(len(names), len(devices))
    pairs = [*combinations(nodes, 2), *product(nodes, met)]
    either = tuple((a, b) for a, b in pairs if devices[a] & devices[b] and not {(a, b), (b, a)} & arcs)
    sets = sorted(frozenset[int]().union(*devices))
    on = tuple(tuple(n for n, each in enumerate(devices) if one in each) for one in sets)
    firsts = tuple((m, part) for m in met for n in on if (part := tuple(j for j in n if (j, m) in arcs)))
    lasts = tuple((m, part) for m in met for n in on if (part := tuple(j for j in n if (m, j) in arcs)))
    needed = {(a, b) for a, b in arcs if not any((a, c) in arcs and (c, b) in arcs for c in rank)}
    ordered = tuple(sorted(needed, key=lambda arc: (rank[arc[0]], rank[arc[1]])))
    return Jobs(tuple(names), tuple(cross_mesh_transfers), ordered, either, on, firsts, lasts)


def too_long(
    jobs: Jobs,
    some: Ints,
    heads_of: SecondsByNode,
    times_of: SecondsByNode,
    tails_of: SecondsByNode,
    work_of: SecondsByNode,
    limit_s: float,
) -> Bools:
    """For each of `some` choices, whether no order of the jobs takes less than `limit_s`.

    Args:
        heads_of: the earliest starts of nodes, for each choice. tails_of: the least times that follow them.
            times_of, work_of: of one run, and of all of a step.
    """
    if not jobs.open:
        return np.zeros(some.shape, dtype=np.bool_)
    zeros = np.zeros((len(jobs.cross_mesh_transfers), len(some)))
    heads, times, tails, work = (
        np.concatenate([np.stack([of[name][some] for name in jobs.names]), zeros])
        for of in (heads_of, times_of, tails_of, work_of)
    )
    firsts, lasts = (np.array(each) for each in zip(*jobs.open))
    both = times[firsts] + times[lasts]
    long = np.zeros(some.shape, dtype=np.bool_)
    _add_transfers(jobs, heads, tails, work)
    _wait(jobs, heads, times, tails)
    known = -1
    for _ in range(PASSES):
        late_last = heads[firsts] + both + tails[lasts] >= limit_s
        late_first = heads[lasts] + both + tails[firsts] >= limit_s
        long |= (late_last & late_first).any(axis=0)
        certain = int(late_last.sum() + late_first.sum())
        if certain == known or long.all():
            break
        known = certain
        for number in np.flatnonzero(late_last.any(axis=1) | late_first.any(axis=1)):
            first, last = jobs.open[number]
            _precede(last, first, late_last[number], heads, times, tails)
            _precede(first, last, late_first[number], heads, times, tails)
        _wait(jobs, heads, times, tails)
        _add_transfers(jobs, heads, tails, work)
        for numbers in map(list, jobs.on):
            long |= one_machines_s(heads[numbers], work[numbers], tails[numbers]) >= limit_s
    return long


def _precede(first: int, last: int, certain: Bools, heads: Floats, times: Floats, tails: Floats) -> None:
    """Let `last` wait for `first` where it is `certain` to."""
    np.maximum(heads[last], heads[first] + times[first], out=heads[last], where=certain)
    np.maximum(tails[first], tails[last] + times[last], out=tails[first], where=certain)


def _wait(jobs: Jobs, heads: Floats, times: Floats, tails: Floats) -> None:
    """Let every job wait for those before it."""
    for a, b in jobs.arcs:
        np.maximum(heads[b], heads[a] + times[a], out=heads[b])
    for a, b in reversed(jobs.arcs):
        np.maximum(tails[a], tails[b] + times[b], out=tails[a])


def _add_transfers(jobs: Jobs, heads: Floats, tails: Floats, work: Floats) -> None:
    """Let transfers wait until a set of devices has done all that is before them, and others for them."""
    for transfer, part in jobs.firsts:
        before = list(part)
        np.maximum(heads[transfer], heads[before].min(axis=0) + work[before].sum(axis=0), out=heads[transfer])
    for transfer, part in jobs.lasts:
        after = list(part)
        np.maximum(tails[transfer], tails[after].min(axis=0) + work[after].sum(axis=0), out=tails[transfer])
