"""How long it takes at least from one run of a node to its next: longest paths, and one-machine bounds.

What one machine does need not be on one set of devices: nodes of which no two run at the same time, because
they share devices or one waits for the other, take as long as one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
    of devices. `serial`: sets of them, as large as can be, of which no two run at the same time.
    """

    descendants: Descendants
    closing: Names
    lags: Mapping[str, int]
    nodes: Names
    parts: tuple[Names, ...]
    serial: tuple[Names, ...]

    @staticmethod
    def of(
        descendants: Descendants,
        closing: Names,
        lags: Mapping[str, int],
        places: Places,
        whole: Set[str],
    ) -> RecurrenceCycle:
        """`whole`: the nodes that run in one piece, so that others wait for all of it."""
        after = descendants.after
        names = tuple(n for n in descendants.before if n in closing or not {*closing}.isdisjoint(after[n]))
        parts = parts_of(names, places)
        ordered = {(b, n) for n in names for b in descendants.before[n] if {b, n} <= whole}
        return RecurrenceCycle(
            descendants, closing, lags, names, parts, _serial(names, parts, ordered, whole)
        )

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
        """What nodes that run one after the other need, between their earliest starts and what follows."""
        return numbers.machines_s([[(heads[n], work[n], tails[n]) for n in part] for part in self.serial])

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


def _serial(
    names: Names, parts: Iterable[Names], ordered: Set[tuple[str, str]], whole: Set[str]
) -> tuple[Names, ...]:
    """The largest sets of nodes of which each two share a set of devices or are `ordered`; without those that
    are on one path, if there are others."""
    number = {name: i for i, name in enumerate(names)}
    in_turn, beside = [0] * len(names), [0] * len(names)  # bits
    for first, last in ordered:
        in_turn[number[last]] |= 1 << number[first]
        in_turn[number[first]] |= 1 << number[last]
    for part in parts:
        every = sum(1 << number[name] for name in part)
        for name in part:
            beside[number[name]] |= every & ~(1 << number[name])
    found = sorted(_cliques([a | b for a, b in zip(in_turn, beside)], 0, (1 << len(names)) - 1, 0))
    once = sum(1 << number[name] for name in whole if name in number)
    pieces = [mask for mask in found if not mask & ~once]
    paths = {mask for mask in pieces if all(not mask & ~in_turn[i] & ~(1 << i) for i in _numbers(mask))}
    kept = [mask for mask in found if mask not in paths] or found[:1]
    return tuple(tuple(names[i] for i in _numbers(mask)) for mask in kept)


def _cliques(near: Sequence[int], chosen: int, more: int, done: int) -> Iterator[int]:
    """The maximal cliques that have `chosen`, any of `more` and none of `done`, as bits, where number `i` is
    next to `near[i]` (Bron and Kerbosch 1973)."""
    if not more | done:
        yield chosen
        return
    pivot = max(_numbers(more | done), key=lambda i: (near[i] & more).bit_count()) if more else 0
    for i in _numbers(more & ~near[pivot]):
        yield from _cliques(near, chosen | 1 << i, more & near[i], done & near[i])
        more, done = more & ~(1 << i), done | 1 << i


def _numbers(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]
