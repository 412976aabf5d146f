"""How long weights move at least to readers of which it is known only that their devices are not their
trainer's.

Sets of devices are rows that do not overlap: two of them share one host at the most, and what is on all
devices is on some that a set has not. So numbers of devices alone tell what has to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from hflow.compiler.candidates.node_groups import Candidate, NodeGroup
from hflow.compiler.planner.bounds.model_points import ModelPoints
from hflow.compiler.planner.bounds.numbers import Floats
from hflow.compiler.planner.effort import CHOICES, PAIR, TIMED
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.placements import Allocation
from hflow.cost.least_weights import ANYWHERE, Receivers, apart, beyond, least_weights_s, within
from hflow.cost.redistribution import waking_s

NO_SET = 1 << 30  # more than there are


class Room(NamedTuple):
    """For a node group: so many devices, or with `fewer` any number up to it, and the bytes that it may
    fill."""

    devices: int
    fewer: bool
    limit_bytes: int


class TimedCandidate(NamedTuple):
    """A candidate, with what its nodes take."""

    candidate: Candidate
    times: tuple[float, ...]


class ReaderMoves:
    """Of one search."""

    def __init__(self, best: Incumbent):
        self.best, self.space, self._cluster = best, best.space, best.space.draft.cluster
        self._groups = {group.name: group for group in self.space.groups}
        self._pairs = list(self._readers())
        self._beside = {
            reader: [n for n, other in self._pairs if other == trainer and n != reader]
            for reader, trainer in self._pairs
        }

    def points(
        self, allocation: Allocation, fixed: int, limits: Mapping[str, int], ungrouped: bool = False
    ) -> Iterator[tuple[str, ModelPoints]]:
        """Of each reader that has other devices than its trainer, or an engine that shares no memory: what
        its nodes, and the weights that come to it, may take at least.

        Args:
            fixed: so many sets have the counts of `allocation`, the others as many devices or fewer.
            limits: the bytes that each node group may fill.
            ungrouped: whether the others may share devices, all of which may have as many.
        """
        sets, counts = self._sets(allocation, fixed if ungrouped else NO_SET), allocation.counts
        total = self.space.num_devices
        for reader, trainer in self._pairs:
            beside = self._beside[reader]
            if not all(self._elsewhere(reader, other, sets, counts) for other in beside):
                continue
            on = sets[reader], sets[trainer]
            one, other = (
                Room(total if n is None else counts[n], n is not None and n >= fixed, limits[name])
                for n, name in zip(on, (reader, trainer))
            )
            if on[0] == on[1]:
                if self._groups[reader].served and not one.fewer and not beside:
                    yield reader, self._together(reader, trainer, one, other)
            elif None not in on:
                yield reader, self._apart(reader, one, other.devices)
            elif on[0] is None and self._most(reader, total) > other.devices:
                yield reader, self._beyond(reader, one, other.devices)
            elif on[1] is None and not beside and self._most(trainer, total) > one.devices:
                yield reader, self._within(reader, trainer, one, other)

    def _sets(self, allocation: Allocation, last: int) -> dict[str, int | None]:
        """The number of the set that each node group is on, those from `last` on taken for one; None for
        those on all devices."""
        sets = enumerate(allocation.partition)
        number_of = {part: min(number, last) for number, members in sets for part in members}
        everywhere = allocation.spread | self.space.pinned.keys()
        return {n: None if n in everywhere else number_of[self._part_of(n)] for n in self._groups}

    def _elsewhere(self, one: str, other: str, sets: Mapping[str, int | None], counts: Sequence[int]) -> bool:
        """Whether two readers are certainly on different devices, so that they share no copy: on sets that
        differ, or the one on more devices than the other's set has."""
        first, second = sets[one], sets[other]
        if first is None:
            return second is not None and self._most(one, self.space.num_devices) > counts[second]
        if second is None:
            return self._most(other, self.space.num_devices) > counts[first]
        return first != second

    def _readers(self) -> Iterator[tuple[str, str]]:
        """With their trainers. Left out are those that read a base, which never changes; and all readers of a
        trainer of which a pin puts one, or the trainer, on a part of the devices."""
        own = ((group.name, self.space.weight_syncs.trainer_of(group)) for group in self._changing())
        every = [(reader, trainer) for reader, trainer in own if trainer]
        parts = {name for name, on in self.space.pinned.items() if len(on) < self.space.num_devices}
        pinned = {trainer for reader, trainer in every if parts & {reader, trainer}}
        yield from (pair for pair in every if pair[1] not in pinned)

    def _changing(self) -> Iterator[NodeGroup]:
        return (group for group in self.space.groups if not group.base)

    def _part_of(self, name: str) -> str:
        return self.space.part_of(self._groups[name])

    def _most(self, name: str, count: int) -> int:
        """On how many of `count` devices a node group runs."""
        return max((n for n in self.space.draft.candidates[name] if n <= count), default=0)

    @memoize
    def _together(self, reader: str, trainer: str, one: Room, other: Room) -> ModelPoints:
        """On the same devices."""
        own = self._timed(reader, one)
        needs = self._needs(reader, own, [ANYWHERE] * len(own), self._timed(trainer, other))
        return self._points((reader, trainer), needs)

    @memoize
    def _apart(self, reader: str, room: Room, others: int) -> ModelPoints:
        """On two sets."""
        own = self._timed(reader, room)
        receivers = _by_count(own, lambda count: apart(count, others, self._cluster))
        return self._points((reader,), self._needs(reader, own, receivers))

    @memoize
    def _beyond(self, reader: str, room: Room, others: int) -> ModelPoints:
        """The reader on all devices."""
        own = self._timed(reader, room)
        receivers = _by_count(own, lambda count: beyond(count, others, self._cluster))
        return self._points((reader,), self._needs(reader, own, receivers))

    @memoize
    def _within(self, reader: str, trainer: str, one: Room, other: Room) -> ModelPoints:
        """The trainer on all devices, the reader on a part of them."""
        own = self._timed(reader, one)
        receivers = _by_count(own, lambda count: within(count, self._cluster))
        return self._points(
            (reader, trainer), self._needs(reader, own, receivers, self._timed(trainer, other))
        )

    def _needs(
        self,
        reader: str,
        own: list[TimedCandidate],
        receivers: list[Receivers],
        trainers: list[TimedCandidate] | None = None,
    ) -> Floats:
        """By choice of the reader, and of its trainer where they may have devices in common: the seconds of
        their nodes, and those that weights move."""
        if not own or trainers == []:
            return np.zeros((0, 0))
        draft, model = self.space.draft, self._groups[reader].model
        shape, dtype = draft.shapes[model], draft.graph.model(model).weight_dtype
        lies, held = ([timed.candidate.lies for timed in each] for each in (own, trainers or []))
        if self._changed_alone(reader):
            moves_s = np.zeros((len(lies), max(1, len(held))))
        else:
            moves_s = least_weights_s(shape, dtype, held, lies, receivers, self._cluster)
        lag = self._groups[reader].lag
        moves_s += [[waking_s(shape, dtype, each.engine, lag, self._cluster)] for each in lies]
        self.best.effort += PAIR * (len(lies) + len(held)) + moves_s.size // CHOICES
        one, other = np.indices(moves_s.shape).reshape(2, -1)
        times = [np.array([timed.times for timed in own])[one]]
        times += [np.array([timed.times for timed in trainers])[other]] if trainers else []
        return np.concatenate([*times, moves_s.reshape(-1, 1)], axis=1)

    def _changed_alone(self, reader: str) -> bool:
        """Whether only changed weights may come to a reader, which may be next to nothing."""
        uses = (node.model for node in self._groups[reader].nodes)
        return any(use and use.delta_weights for use in uses)

    @memoize
    def _timed(self, name: str, room: Room) -> list[TimedCandidate]:
        """The candidates in which all nodes of a node group run."""
        sizes = sorted(n for n in self.space.draft.candidates[name] if n <= room.devices)
        found: list[TimedCandidate] = []
        for candidate in chain.from_iterable(
            self.space.candidates(name, size) for size in (sizes if room.fewer else sizes[-1:])
        ):
            configs = [front.fastest(room.limit_bytes - candidate.idle_bytes) for front in candidate.fronts]
            times = tuple(config.time_s + candidate.swap_s for config in configs if config)
            if len(times) == len(configs):
                found.append(TimedCandidate(candidate, times))
        self.best.effort += TIMED * len(found)
        return found

    def _points(self, groups: tuple[str, ...], needs: Floats) -> ModelPoints:
        """Those that no other beats in all respects. `groups`: the reader first."""
        names = tuple(node.name for name in groups for node in self._groups[name].nodes)
        kept = _unbeaten(needs).reshape(-1, len(names) + 1)
        moves = np.full((len(kept), len(names)), np.nan)
        moves[:, 0] = kept[:, -1]
        return ModelPoints(names, kept[:, :-1], moves)


def _unbeaten(needs: Floats) -> Floats:
    """Rows of which no other is as small everywhere. What needs no more needs no more in sum: in this order
    none beats an earlier one."""
    left, kept = needs[np.argsort(needs.sum(axis=1), kind="stable")], list[Floats]()
    while len(left):
        kept.append(left[0])
        left = left[(left < left[0]).any(axis=1)]
    return np.array(kept)


def _by_count(every: Sequence[TimedCandidate], receivers: Callable[[int], Receivers]) -> list[Receivers]:
    """Of each of some candidates, those that its number of devices makes."""
    counts = [timed.candidate.num_devices for timed in every]
    of_count = {count: receivers(count) for count in {*counts}}
    return [of_count[count] for count in counts]
