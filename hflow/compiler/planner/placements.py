"""Which parts share devices, and how many devices each set of them gets.

A part is a model with its node groups, or a node group that is `apart` from its model's others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hflow.compiler.options import PlacementPolicy
from hflow.graph.ir import Graph

Members = tuple[str, ...]  # parts of a set
Partition = tuple[Members, ...]


class Colocation(NamedTuple):
    """Which parts share a set of devices. The node groups `spread` run on all devices of the cluster instead.
    `first`: see `Allocation`."""

    partition: Partition
    spread: frozenset[str] = frozenset()
    first: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Each set of a partition on `counts` devices in a row. The node groups `spread` run on all devices of
    the cluster instead. `first`: the device from which the sets follow each other in their order; None where
    no place is better than another: larger ones come first, so that none lies across hosts without need."""

    partition: Partition
    counts: tuple[int, ...]
    spread: frozenset[str] = frozenset()
    first: int | None = None

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first device of each set."""
        order = list(range(len(self.counts)))
        if self.first is None:
            order.sort(key=lambda i: (-self.counts[i], i))
        firsts, first = [0] * len(order), self.first or 0
        for i in order:
            firsts[i] = first
            first += self.counts[i]
        return tuple(firsts)


def partitions(
    graph: Graph,
    models: Sequence[str],
    placement: PlacementPolicy,
    together: Sequence[tuple[str, ...]] = (),
) -> Iterator[Partition]:
    """The partitions of `models` that `placement` admits; few sets first.

    Args:
        together: models that one set has, or none does.
    """
    for partition in _admitted(graph, models, placement):
        if all(len({*own} & {*members}) in (0, len(own)) for own in together for members in partition):
            yield partition


def _admitted(graph: Graph, models: Sequence[str], placement: PlacementPolicy) -> Iterator[Partition]:
    if placement == "colocate":
        yield (tuple(models),) if models else ()
    elif placement == "standalone":
        yield tuple((m,) for m in models)
    elif placement == "split":
        yield from _split(graph, models)
    else:
        yield from set_partitions(models)


def set_partitions(parts: Sequence[str]) -> list[Partition]:
    """All partitions of `parts`; few sets first."""
    return sorted(_all(tuple(parts)), key=len)


def _split(graph: Graph, models: Sequence[str]) -> Iterator[Partition]:
    """Models with an ``lm`` head apart from those with a scalar one; where all are alike, any two sets."""
    language = tuple(m for m in models if graph.model(m).head == "lm")
    others = tuple(m for m in models if m not in language)
    if language and others:
        yield language, others
    else:
        yield from (p for p in _all(tuple(models)) if len(p) == 2)


def _all(models: tuple[str, ...]) -> Iterator[Partition]:
    """All set partitions: the last model joins a set of the others', or is alone."""
    if not models:
        yield ()
        return
    *others, last = models
    for partition in _all(tuple(others)):
        for number, members in enumerate(partition):
            yield *partition[:number], (*members, last), *partition[number + 1 :]
        yield *partition, (last,)


def allocations(partition: Partition, sizes: Sequence[Sequence[int]], total: int) -> Iterator[Allocation]:
    """All ways to give each set of `partition` one of its `sizes`, `total` devices at most."""
    least = [min(candidates, default=total + 1) for candidates in sizes]

    def extend(counts: tuple[int, ...], left: int) -> Iterator[Allocation]:
        number = len(counts)
        if number == len(partition):
            yield Allocation(partition, counts)
            return
        rest = sum(least[number + 1 :])
        for count in sizes[number]:
            if count + rest <= left:
                yield from extend((*counts, count), left - count)

    yield from extend((), total)
