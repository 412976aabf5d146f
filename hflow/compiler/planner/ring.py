"""How long it takes at least from one run of a node to its next: longest paths, and one-machine bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic

from hflow.compiler.planner.numbers import N, Numbers
from hflow.compiler.planner.reach import Reach

Places = Mapping[str, tuple[int, ...]]  # resources by node
Parts = tuple[tuple[str, ...], ...]  # of some nodes, those on each set of devices


@dataclass(frozen=True)
class Course:
    """What follows from a node, on certain devices. `done`: what comes before each node."""

    reach: Reach
    done: Mapping[str, Parts]

    @staticmethod
    def of(reach: Reach, places: Places) -> Course:
        return Course(reach, {name: parts_of(before, places) for name, before in reach.before.items()})

    def heads(self, numbers: Numbers[N], times: Mapping[str, N], work: Mapping[str, N]) -> dict[str, N]:
        """The earliest start of each node: after the longest path to it, and after what has to be done before
        it on any one set of devices."""
        heads = {self.reach.first: numbers.zero(times[self.reach.first])}
        for name, before in self.reach.nodes[1:]:
            paths = (heads[b] + times[b] + gap for b, gap in before)
            heads[name] = numbers.most((*paths, *_done_s(numbers, self.done[name], heads, work)))
        return heads


@dataclass(frozen=True)
class Measured(Generic[N]):
    """`least_s`: what it takes at least; `heads`, `tails`: the earliest starts of nodes and the least that
    follows them, without tails where a single node closes it."""

    least_s: N
    heads: Mapping[str, N]
    tails: Mapping[str, N]


@dataclass(frozen=True)
class Ring:
    """A course up to the nodes that close it: these end before the first node's next run. `lags`: of nodes
    that end before one so many steps later. `left`: what comes after each node that is followed by a closing
    one, or is one; `jobs`: these nodes."""

    course: Course
    closing: tuple[str, ...]
    lags: Mapping[str, int]
    left: Mapping[str, Parts]
    jobs: Parts

    @staticmethod
    def of(course: Course, closing: tuple[str, ...], lags: Mapping[str, int], places: Places) -> Ring:
        after = course.reach.after
        names = [n for n in course.reach.before if n in closing or not {*closing}.isdisjoint(after[n])]
        left = {name: parts_of([n for n in after[name] if n in names], places) for name in names}
        return Ring(course, closing, lags, left, parts_of(names, places))

    def measured(self, numbers: Numbers[N], times: Mapping[str, N], work: Mapping[str, N]) -> Measured[N]:
        """Args: `work`: of all runs of a node in a step."""
        heads = self.course.heads(numbers, times, work)
        ends = [heads[name] + times[name] for name in self.closing]
        ends += [(heads[name] + times[name]) / (1 + lag) for name, lag in self.lags.items()]
        zero = numbers.zero(times[self.course.reach.first])
        if len(self.closing) < 2:
            return Measured(numbers.most((zero, *ends)), heads, {})
        tails = self._tails(numbers, times, work)
        machines = (numbers.machine_s([(heads[n], work[n], tails[n]) for n in part]) for part in self.jobs)
        return Measured(numbers.most((zero, *ends, *machines)), heads, tails)

    def _tails(self, numbers: Numbers[N], times: Mapping[str, N], work: Mapping[str, N]) -> dict[str, N]:
        """The least time from the end of each node to that of the last closing one after it."""
        tails = {name: numbers.zero(times[name]) for name in self.closing}
        for name, before in reversed(self.course.reach.nodes):
            if name not in tails:
                continue
            tails[name] = numbers.most((tails[name], *_done_s(numbers, self.left[name], tails, work)))
            for b, gap in before:
                path = tails[name] + times[name] + gap
                tails[b] = numbers.most((tails[b], path)) if b in tails else path
        return tails


def parts_of(names: Iterable[str], places: Places) -> Parts:
    """Nodes by the set of devices that they are on; one on several counts for each."""
    parts: dict[int, list[str]] = {}
    for name in names:
        for resource in places[name]:
            parts.setdefault(resource, []).append(name)
    return tuple(dict.fromkeys(map(tuple, parts.values())))


def _done_s(numbers: Numbers[N], parts: Parts, known: Mapping[str, N], work: Mapping[str, N]) -> Iterator[N]:
    """When each set of devices can have done its part, all of which waits for `known` times."""
    for part in parts:
        yield numbers.least([known[n] for n in part]) + sum(work[n] for n in part)
