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

from hflow.compiler.planner.crossings import Meeting

PASSES = 4  # more of them seldom find more
Seconds = Mapping[str, float]  # by node
Arc = tuple[int, int]  # numbers of two jobs, of which the one is before the other
Job = tuple[float, float, float]  # its earliest start, its work, the least time that follows it


@dataclass(frozen=True)
class Jobs:
    """Nodes in topological order, then meetings. `arcs`: which are before which; `open`: pairs on common
    devices of which either may be first; `on`: the jobs of each set of devices. `firsts`, `lasts`: those on
    one set that are before, or after, a meeting."""

    names: tuple[str, ...]
    meetings: tuple[Meeting, ...]
    arcs: tuple[Arc, ...]
    open: tuple[Arc, ...]
    on: tuple[tuple[int, ...], ...]
    firsts: tuple[tuple[int, tuple[int, ...]], ...]
    lasts: tuple[tuple[int, tuple[int, ...]], ...]


def jobs_of(
    names: Sequence[str],
    before: Mapping[str, Collection[str]],
    places: Mapping[str, tuple[int, ...]],
    meetings: Sequence[Meeting],
    whole: Collection[str],
) -> Jobs:
    """Nodes in topological order, of which `before` tells all that come before them, and `whole` those that
    run in one piece."""
    number = {name: i for i, name in enumerate(names)}
    arcs = {(number[b], number[n]) for n in names for b in before[n] if b in number}
    rank = {i: float(i) for i in range(len(names))}
    for i, meeting in enumerate(meetings, len(names)):
        arcs |= {(number[n], i) for n in meeting.after} | {(i, number[n]) for n in meeting.before}
        rank[i] = max(number[n] for n in meeting.after) + 0.5
    devices = [*(frozenset(places[name]) for name in names), *(m.devices for m in meetings)]
    nodes = [number[n] for n in names if n in whole]
    met = range(len(names), len(devices))
    pairs = [*combinations(nodes, 2), *product(nodes, met)]
    either = tuple((a, b) for a, b in pairs if devices[a] & devices[b] and not {(a, b), (b, a)} & arcs)
    sets = sorted(frozenset[int]().union(*devices))
    on = tuple(tuple(n for n, each in enumerate(devices) if one in each) for one in sets)
    firsts = tuple((m, part) for m in met for n in on if (part := tuple(j for j in n if (j, m) in arcs)))
    lasts = tuple((m, part) for m in met for n in on if (part := tuple(j for j in n if (m, j) in arcs)))
    ordered = tuple(sorted(arcs, key=lambda arc: (rank[arc[0]], rank[arc[1]])))
    return Jobs(tuple(names), tuple(meetings), ordered, either, on, firsts, lasts)


def too_long(
    jobs: Jobs, heads_of: Seconds, times_of: Seconds, tails_of: Seconds, work_of: Seconds, limit_s: float
) -> bool:
    """Whether no order of the jobs takes less than `limit_s`.

    Args:
        heads_of: the earliest starts of nodes. tails_of: the least times that follow them. times_of, work_of:
            of one run, and of all of a step.
    """
    zeros = [0.0] * len(jobs.meetings)
    times, work = (
        [*map(times_of.__getitem__, jobs.names), *zeros],
        [*map(work_of.__getitem__, jobs.names), *zeros],
    )
    heads, tails = ([*map(of.__getitem__, jobs.names), *zeros] for of in (heads_of, tails_of))
    _meet(jobs, heads, tails, work)
    _raised(jobs.arcs, heads, times, tails)
    for _ in range(PASSES):
        certain: list[Arc] = []
        for a, b in jobs.open:
            both = times[a] + times[b]
            late_b, late_a = heads[a] + both + tails[b] >= limit_s, heads[b] + both + tails[a] >= limit_s
            if late_a and late_b:
                return True
            if late_a or late_b:
                certain.append((b, a) if late_b else (a, b))
        if not _raised((*certain, *jobs.arcs), heads, times, tails):
            return False
        _meet(jobs, heads, tails, work)
        every = [(head, seconds, tail) for head, seconds, tail in zip(heads, work, tails)]
        if any(machine_s([every[n] for n in numbers]) >= limit_s for numbers in jobs.on):
            return True
    return False


def machine_s(jobs: Sequence[Job]) -> float:
    """For all jobs that start no earlier and are followed by no less than some: the earliest start, their
    work, the least that follows."""
    best, late_first = 0.0, sorted(jobs, reverse=True)
    for _, _, least in jobs:
        total = 0.0
        for head, work, tail in late_first:
            if tail >= least:
                total += work
                best = max(best, head + total + least)
    return best


def _raised(arcs: Sequence[Arc], heads: list[float], times: Sequence[float], tails: list[float]) -> bool:
    """Let every job wait for those before it."""
    before = (*heads, *tails)
    for a, b in arcs:
        heads[b] = max(heads[b], heads[a] + times[a])
    for a, b in reversed(arcs):
        tails[a] = max(tails[a], tails[b] + times[b])
    return before != (*heads, *tails)


def _meet(jobs: Jobs, heads: list[float], tails: list[float], work: Sequence[float]) -> None:
    """Let meetings wait until a set of devices has done all that is before them, and others for them."""
    for meeting, part in jobs.firsts:
        heads[meeting] = max(heads[meeting], min(heads[n] for n in part) + sum(work[n] for n in part))
    for meeting, part in jobs.lasts:
        tails[meeting] = max(tails[meeting], min(tails[n] for n in part) + sum(work[n] for n in part))
