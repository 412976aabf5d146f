"""How long it takes at least from one run of a node to its next: longest paths, and one-machine bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from hflow.compiler.planner.bounds.descendants import Descendants
from hflow.compiler.planner.bounds.numbers import Floats, N, Numbers

Places = Mapping[str, tuple[int, ...]]  # resources by node
Names = tuple[str, ...]
OrderedPart = tuple[
    Names, int
]  # of nodes on one set of devices, those that come first, or last; and its number


@dataclass(frozen=True)
class Parts:
    """For each node what comes before it, or after it, by set of devices, if paths alone do not tell when it
    is done. `member`: which `nodes` are in which part."""

    nodes: Names
    of: Mapping[str, tuple[OrderedPart, ...]]
    member: Floats

    @staticmethod
    def made(nodes: Names, around: Mapping[str, Names], places: Places, whole: Set[str]) -> Parts:
        """`around`: all that comes before each node, or all that comes after it. `whole`: what runs once."""
        rows: dict[Names, int] = {}
        of: dict[str, tuple[OrderedPart, ...]] = {}
        for name, others in around.items():
            parts = (p for p in parts_of(others, places) if not (whole >= {*p} and _in_turn(p, around)))
            of[name] = tuple((_outermost(part, around), rows.setdefault(part, len(rows))) for part in parts)
        member = np.array([[float(name in part) for name in nodes] for part in rows])
        return Parts(nodes, of, member.reshape(len(rows), len(nodes)))

    def work_s(self, numbers: Numbers[N], work: Mapping[str, N]) -> Sequence[N]:
        """What all nodes of each part do."""
        return numbers.sums(self.member, [work[name] for name in self.nodes])


@dataclass(frozen=True)
class PathBounds:
    """What follows from a node, on certain devices. `done`: what comes before each node."""

    descendants: Descendants
    done: Parts

    @staticmethod
    def of(descendants: Descendants, places: Places, whole: Set[str]) -> PathBounds:
        return PathBounds(
            descendants, Parts.made(tuple(descendants.before), descendants.before, places, whole)
        )

    def heads(self, numbers: Numbers[N], times: Mapping[str, N], work: Mapping[str, N]) -> dict[str, N]:
        """The earliest start of each node: after the longest path to it, and after what has to be done before
        it on any one set of devices."""
        heads = {self.descendants.first: numbers.zero(times[self.descendants.first])}
        work_s = self.done.work_s(numbers, work)
        for name, before in self.descendants.nodes[1:]:
            paths = (heads[b] + times[b] + gap for b, gap in before)
            heads[name] = numbers.most((*paths, *_done_s(numbers, self.done.of[name], heads, work_s)))
        return heads


@dataclass(frozen=True)
class RecurrenceCycle:
    """What runs from the start of one node to the start of its next run.

    `paths`: the node and all that follows it in the step. `closing`: the nodes that must end before its next
    run. `lags`: trainers whose weights the node reads so many steps later. `left`: for each node that leads
    to a closing node, or is one, what comes after it. `jobs`: these nodes, by set of devices.
    """

    paths: PathBounds
    closing: Names
    lags: Mapping[str, int]
    left: Parts
    jobs: tuple[Names, ...]

    @staticmethod
    def of(
        paths: PathBounds, closing: Names, lags: Mapping[str, int], places: Places, whole: Set[str]
    ) -> RecurrenceCycle:
        after = paths.descendants.after
        names = tuple(
            n for n in paths.descendants.before if n in closing or not {*closing}.isdisjoint(after[n])
        )
        left = {name: tuple(n for n in after[name] if n in names) for name in names}
        return RecurrenceCycle(
            paths, closing, lags, Parts.made(names, left, places, whole), parts_of(names, places)
        )

    @cached_property
    def alone(self) -> bool:
        """Whether one set of devices does all of it: that takes no less than what the set does in a step, but
        for calls in between."""
        return not self.lags and any(len(part) == len(self.left.nodes) for part in self.jobs)

    def least_s(self, numbers: Numbers[N], times: Mapping[str, N], work: Mapping[str, N]) -> N:
        """What it takes at least, whatever the order of the nodes.

        Args:
            work: of all runs of a node in a step.
        """
        heads = self.paths.heads(numbers, times, work)
        ends_s = self.ends_s(numbers, heads, times)
        if len(self.closing) < 2:
            return ends_s
        tails = self.tails(numbers, times, work)
        return numbers.most((ends_s, self.busiest_s(numbers, heads, work, tails)))

    def ends_s(self, numbers: Numbers[N], heads: Mapping[str, N], times: Mapping[str, N]) -> N:
        """When the last closing node ends, at the earliest, if each begins when it can."""
        ends = [heads[name] + times[name] for name in self.closing]
        ends += [(heads[name] + times[name]) / (1 + lag) for name, lag in self.lags.items()]
        return numbers.most((numbers.zero(times[self.paths.descendants.first]), *ends))

    def busiest_s(
        self, numbers: Numbers[N], heads: Mapping[str, N], work: Mapping[str, N], tails: Mapping[str, N]
    ) -> N:
        """What any one set of devices needs, between the earliest starts of its nodes and what follows."""
        return numbers.machines_s([[(heads[n], work[n], tails[n]) for n in part] for part in self.jobs])

    def tails(self, numbers: Numbers[N], times: Mapping[str, N], work: Mapping[str, N]) -> dict[str, N]:
        """The least time from the end of each node to that of the last closing one after it; for recurrence
        cycles with more closing nodes than one."""
        tails = {name: numbers.zero(times[name]) for name in self.closing}
        work_s = self.left.work_s(numbers, work)
        for name, before in reversed(self.paths.descendants.nodes):
            if name not in tails:
                continue
            parts = self.left.of[name]
            tails[name] = numbers.most((tails[name], *_done_s(numbers, parts, tails, work_s)))
            for b, gap in before:
                path = tails[name] + times[name] + gap
                tails[b] = numbers.most((tails[b], path)) if b in tails else path
        return tails


def parts_of(names: Iterable[str], places: Places) -> tuple[Names, ...]:
    """Nodes by the set of devices that they are on; one on several counts for each."""
    parts: dict[int, list[str]] = {}
    for name in names:
        for resource in places[name]:
            parts.setdefault(resource, []).append(name)
    return tuple(dict.fromkeys(map(tuple, parts.values())))


def _outermost(part: Names, around: Mapping[str, Names]) -> Names:
    """Those with no other of the part before them, or after them; others start, or are followed, later."""
    return tuple(name for name in part if set(part).isdisjoint(around[name]))


def _in_turn(part: Names, around: Mapping[str, Names]) -> bool:
    """Whether of each two the one waits for the other: then a path leads through all of them."""
    return all(one in around[other] or other in around[one] for one, other in combinations(part, 2))


def _done_s(
    numbers: Numbers[N], parts: Sequence[OrderedPart], known: Mapping[str, N], work_s: Sequence[N]
) -> Iterator[N]:
    """When each set of devices can have done its part, all of which waits for `known` times."""
    for first, row in parts:
        yield numbers.least([known[name] for name in first]) + work_s[row]
