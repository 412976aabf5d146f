"""All plans to choose from: partitions of the models, devices for each set of them, seats for units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations

from hflow.compiler.candidates.node_groups import Option, Unit
from hflow.compiler.planner.memoize import kept
from hflow.compiler.planner.placements import Allocation, Partition, partitions
from hflow.compiler.planner.renewals import Renewals
from hflow.compiler.planner.seats import Seat
from hflow.compiler.planner.step import StepModel
from hflow.compiler.state import Draft
from hflow.schedule.tasks import device_classes

Devices = tuple[int, ...]


@dataclass(frozen=True)
class Space:
    """A model lies on the devices of its set, a unit on the largest part of them on which it can run.
    Generation may use all devices of the cluster instead. A unit whose devices are pinned lies there."""

    draft: Draft
    model: StepModel

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.model.units

    @property
    def num_devices(self) -> int:
        return self.draft.cluster.num_devices

    @cached_property
    def pinned(self) -> dict[str, tuple[int, ...]]:
        """The devices of units that are pinned to some."""
        unit_of = self.model.unit_of
        return {unit_of[p.node]: p.devices for p in self.draft.pins if p.devices and p.node in unit_of}

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The models of which some unit is not pinned, in graph order."""
        free = {u.model for u in self.units if u.name not in self.pinned}
        return tuple(m.name for m in self.draft.graph.models if m.name in free)

    def partitions(self) -> Iterator[Partition]:
        return partitions(self.draft.graph, self.models, self.draft.options.placement)

    @kept
    def options(self, unit: str, count: int) -> tuple[Option, ...]:
        """The options of a unit on the most devices, `count` at most, on which it can run."""
        most = max((n for n in self.draft.candidates[unit] if n <= count), default=0)
        return self.draft.candidates[unit][most] if most else ()

    @cached_property
    def renewals(self) -> Renewals:
        return Renewals(self.draft)

    def free_units(self, members: Sequence[str]) -> list[Unit]:
        """The units of the models of a set that are not pinned."""
        return [u for u in self.units if u.model in members and u.name not in self.pinned]

    def sizes(self, members: Sequence[str]) -> tuple[int, ...]:
        """Numbers of devices that make a difference to a set, ascending: those on which some unit can run, as
        long as all can run on as many or fewer."""
        own = [self.draft.candidates[u.name] for u in self.free_units(members)]
        least = max(min(options) for options in own)
        return tuple(sorted({n for options in own for n in options if n >= least}))

    def spreads(self, partition: Partition) -> tuple[frozenset[str], ...]:
        """The choices of units that run on all devices: any that generate, where models are apart."""
        units = [u.name for u in self.units if u.role == "generate" and u.name not in self.pinned]
        if len(partition) < 2:
            return (frozenset(),)
        subsets = (combinations(units, size) for size in range(len(units) + 1))
        return tuple(frozenset(names) for each in subsets for names in each)

    def seats(self, allocation: Allocation) -> dict[str, tuple[Seat, ...]]:
        """For every unit its seats, the fastest first."""
        ranges = {
            model: (first, count)
            for members, first, count in zip(allocation.partition, allocation.firsts, allocation.counts)
            for model in members
        }
        resources = self._resources(allocation)
        found: dict[str, tuple[Seat, ...]] = {}
        for unit in self.units:
            if unit.name in self.pinned:
                devices = self.pinned[unit.name]
            elif unit.name in allocation.spread:
                devices = self.draft.cluster.devices
            else:
                devices = _row(*ranges[unit.model])
            found[unit.name] = tuple(self._on(unit, devices, resources[devices]))
        return found

    def _on(self, unit: Unit, devices: Devices, resources: tuple[int, ...]) -> Iterator[Seat]:
        for option in self.options(unit.name, len(devices)):
            yield Seat(option, devices[: option.num_devices], resources)

    def _resources(self, allocation: Allocation) -> dict[Devices, tuple[int, ...]]:
        """For each place the numbers of the sets of devices, disjoint ones, that it consists of."""
        rows = map(_row, allocation.firsts, allocation.counts)
        places = tuple(dict.fromkeys((*rows, *self.pinned.values(), self.draft.cluster.devices)))
        parts: dict[Devices, list[int]] = {place: [] for place in places}
        for number, members in enumerate(device_classes(places).values()):
            for place in members:
                parts[places[place]].append(number)
        return {place: tuple(numbers) for place, numbers in parts.items()}


@cache
def _row(first: int, count: int) -> Devices:
    return tuple(range(first, first + count))
