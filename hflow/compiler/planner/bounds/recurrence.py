"""How long it takes at least from one run of a node to its next: longest paths, and one-machine bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hflow.compiler.planner.bounds.descendants import Descendants
from hflow.compiler.planner.bounds.numbers import N, Numbers

Places = Mapping[str, tuple[int, ...]]  # resources by node
Names = tuple[str, ...]


@dataclass(frozen=True)
class RecurrenceCycle:
    """The work between the start of a node and the start of its next run, which waits for the `closing`
    nodes.

    `descendants`: the node and all that follows it in the step. `lags`: trainers whose weights the node reads
    so many steps later. `nodes`: those that lead to a closing node, or are one. `parts`: these nodes, by set
    of devices.
    """

    descendants: Descendants
    closing: Names
    lags: Mapping[str, int]
    nodes: Names
    parts: tuple[Names, ...]

    @staticmethod
    def of(
        descendants: Descendants, closing: Names, lags: Mapping[str, int], places: Places
    ) -> RecurrenceCycle:
        after = descendants.after
        names = tuple(n for n in descendants.before if n in closing or not {*closing}.isdisjoint(after[n]))
        return RecurrenceCycle(descendants, closing, lags, names, parts_of(names, places))

    @cached_property
    def alone(self) -> bool:
        """Whether one set of devices does all of it: that takes no less than what the set does in a step, but
        for calls in between."""
        return not self.lags and any(len(part) == len(self.nodes) for part in self.parts)

    def least_s(self, numbers: Numbers[N], times: Mapping[str, N], work: Mapping[str, N]) -> N:
        """What it takes at least, whatever the order of the nodes.

        Args:
            work: of all runs of a node in a step.
        """
        heads = self.heads(numbers, times)
        ends_s = self.ends_s(numbers, heads, times)
        if len(self.closing) < 2:
            return ends_s
        tails = self.tails(numbers, times)
        return numbers.most((ends_s, self.busiest_s(numbers, heads, work, tails)))

    def heads(self, numbers: Numbers[N], times: Mapping[str, N]) -> dict[str, N]:
        """The earliest start of each node: after the longest path to it."""
        heads = {self.descendants.first: numbers.zero(times[self.descendants.first])}
        for name, before in self.descendants.nodes[1:]:
            heads[name] = numbers.most(heads[b] + times[b] + gap for b, gap in before)
        return heads

    def ends_s(self, numbers: Numbers[N], heads: Mapping[str, N], times: Mapping[str, N]) -> N:
        """When the last closing node ends, at the earliest, if each begins when it can."""
        ends = [heads[name] + times[name] for name in self.closing]
        ends += [(heads[name] + times[name]) / (1 + lag) for name, lag in self.lags.items()]
        return numbers.most((numbers.zero(times[self.descendants.first]), *ends))

    def busiest_s(
        self, numbers: Numbers[N], heads: Mapping[str, N], work: Mapping[str, N], tails: Mapping[str, N]
    ) -> N:
        """What any one set of devices needs, between the earliest starts of its nodes and what follows."""
        return numbers.machines_s([[(heads[n], work[n], tails[n]) for n in part] for part in self.parts])

    def tails(self, numbers: Numbers[N], times: Mapping[str, N]) -> dict[str, N]:
        """The least time from the end of each node to that of the last closing one after it; for recurrence
        cycles with more closing nodes than one."""
        tails = {name: numbers.zero(times[name]) for name in self.closing}
        for name, before in reversed(self.descendants.nodes):
            for b, gap in before if name in tails else ():
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
