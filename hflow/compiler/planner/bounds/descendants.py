"""Nodes that follow from one, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

Before = tuple[tuple[str, float], ...]  # predecessors, with the least time between
Gaps = Mapping[str, float]  # the most between a node and each before it, without the times of nodes


@dataclass(frozen=True)
class Descendants:
    """What follows from `first`, itself included, in topological order with predecessors among it."""

    first: str
    nodes: tuple[tuple[str, Before], ...]

    @staticmethod
    def of(first: str, nodes: Iterable[tuple[str, Before]]) -> Descendants:
        """Without what a node waits for anyway, because another path to it is no shorter."""
        gaps: dict[str, Gaps] = {}
        kept: list[tuple[str, Before]] = []
        for name, before in nodes:
            via = {b: {**{c: far + gap for c, far in gaps[b].items()}, b: gap} for b, gap in before}
            kept.append((name, tuple((b, gap) for b, gap in before if not _waits_anyway(b, gap, via))))
            gaps[name] = {b: max(each.get(b, 0.0) for each in via.values()) for b in chain(*via.values())}
        return Descendants(first, tuple(kept))

    @cached_property
    def before(self) -> dict[str, tuple[str, ...]]:
        """All that each node follows from."""
        found: dict[str, frozenset[str]] = {}
        for name, before in self.nodes:
            found[name] = frozenset().union(*({b} | found[b] for b, _ in before))
        return {name: tuple(n for n, _ in self.nodes if n in found[name]) for name in found}

    @cached_property
    def after(self) -> dict[str, tuple[str, ...]]:
        """All that follows from each node."""
        return {name: tuple(n for n in self.before if name in self.before[n]) for name in self.before}


def _waits_anyway(name: str, gap: float, via: Mapping[str, Gaps]) -> bool:
    return any(each.get(name, -1.0) >= gap for last, each in via.items() if last != name)
