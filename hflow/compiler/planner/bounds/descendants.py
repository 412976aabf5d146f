"""Nodes that follow from one, and what each of them waits for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Before = tuple[tuple[str, float], ...]  # predecessors, with the least time between


@dataclass(frozen=True)
class Descendants:
    """What follows from `first`, itself included, in topological order with predecessors among it."""

    first: str
    nodes: tuple[tuple[str, Before], ...]

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
