"""What the space leaves out: units on a part of the devices, wherever their models are.

In the space (`space`) models share devices wholly or not at all, and a unit runs on all of its set's, or
generates on all of the cluster. A pin can put it anywhere. Where every unit is on all devices the plan is in
the space; so what is left out has some unit on fewer. Whether such a plan might be shorter than the best of
the space is asked of a relaxation that no plan can beat: any options, on any devices; rows and weights move
in no time; what others keep in memory is spread evenly. Its step lasts as long as all devices together need
for the work, and as long as the rings of nodes take (`bounds`) if every unit has devices of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd

from hflow.compiler.pins import Pin
from hflow.compiler.planner.bounds import Bounds
from hflow.compiler.planner.layouts import options_of, sizes
from hflow.compiler.planner.space import Space
from hflow.compiler.planner.unit import Option, Unit

EFFORT = 2000  # bounds for each unit, of about 0.05 ms: what they leave open counts as shorter
Times = Mapping[str, float]
Taken = tuple[tuple[Unit, Option], ...]


def unsearched(space: Space, limit_s: float) -> tuple[Unit, ...]:
    """The units that are on a part of the devices in some plan which is not in the space and, as far as
    bounds tell, may take less than `limit_s`; those that generate come first."""
    free = [unit for unit in space.units if unit.name not in space.pinned]
    if not free or space.num_devices == 1:
        return ()
    if all(len(partition) > 1 for partition in space.partitions()):
        found = free  # that all models share all devices is not admitted
    else:
        options = {unit.name: all_options(space, unit) for unit in space.units}
        bounds = Bounds(space.draft)
        found = [unit for unit in free if _Elsewhere(space, limit_s, unit, options, bounds).exists]
    return tuple(sorted(found, key=lambda unit: unit.role != "generate"))


def pin_apart(space: Space, unit: Unit) -> str:
    """A pin that puts `unit` on the last of the devices, at most half of them: ``rollout=@8-15``."""
    total = space.num_devices
    few = [count for count in space.draft.candidates[unit.name] if 2 * count <= total]
    first = total - max(few, default=1)
    return f"{unit.nodes[0].name}=@{first}" + (f"-{total - 1}" if first < total - 1 else "")


@dataclass
class _Elsewhere:
    """Plans that take less than `limit_s` with `apart` on a part of the devices. `effort`: bounds so far."""

    space: Space
    limit_s: float
    apart: Unit
    options: Mapping[str, tuple[Option, ...]]
    bounds: Bounds
    effort: int = 0

    @cached_property
    def exists(self) -> bool:
        units = sorted(self.space.units, key=lambda u: (u is not self.apart, -self._least_s(u)))
        return self._exists((), units)

    def _exists(self, taken: Taken, left: Sequence[Unit]) -> bool:
        if not left:
            return True
        unit, *others = left
        for option in self._options(unit):
            self.effort += 1
            if self.effort > EFFORT:
                return True
            both = (*taken, (unit, option))
            if self._bound_s(both) < self.limit_s and self._exists(both, others):
                return True
        return False

    def _options(self, unit: Unit) -> tuple[Option, ...]:
        found = self.options[unit.name]
        if unit is not self.apart:
            return found
        return tuple(option for option in found if option.num_devices < self.space.num_devices)

    def _least_s(self, unit: Unit) -> float:
        return min((option.least_s for option in self._options(unit)), default=0.0)

    @cached_property
    def _places(self) -> dict[str, tuple[int, ...]]:
        return {node.name: (i,) for i, unit in enumerate(self.space.units) for node in unit.nodes}

    @cached_property
    def _least(self) -> dict[str, float]:
        """The least time of each node."""
        return {
            node.name: min((o.ways[i].least_s + o.swap_s for o in self._options(unit)), default=0.0)
            for unit in self.space.units
            for i, node in enumerate(unit.nodes)
        }

    @cached_property
    def _least_work(self) -> dict[str, float]:
        """By unit the least seconds of all its devices together."""
        return {
            unit.name: min((self._work(unit, o, _alone(unit, o)) for o in self._options(unit)), default=0.0)
            for unit in self.space.units
        }

    def _work(self, unit: Unit, option: Option, times: Times) -> float:
        rounds = self.bounds.rounds
        return option.num_devices * sum(times[node.name] * rounds[node.name] for node in unit.nodes)

    def _bound_s(self, taken: Taken) -> float:
        times: dict[str, float] = {}
        for unit, option in taken:
            own = self._times(unit, option, taken)
            if own is None:
                return float("inf")
            times.update(own)
        names = {unit.name for unit, _ in taken}
        work = sum(self._work(unit, option, times) for unit, option in taken)
        work += sum(least for name, least in self._least_work.items() if name not in names)
        ring_s = self.bounds.step_s({**self._least, **times}, self._places)
        return max(work / self.space.num_devices, ring_s)

    def _times(self, unit: Unit, option: Option, taken: Taken) -> dict[str, float] | None:
        """Of the unit's nodes, in the memory that others leave at most on its fullest device."""
        total = self.space.num_devices
        others = (
            (o.idle_bytes, option.num_devices + o.num_devices - total) for u, o in taken if u is not unit
        )
        beside = sum(size * max(0, shared) for size, shared in others) // option.num_devices
        room = self.space.draft.cluster.device.usable_bytes - option.idle_bytes - beside
        room -= self._copy_bytes(unit, option, taken)
        ways = [each.fastest(room) for each in option.ways]
        times = {n.name: way.time_s + option.swap_s for n, way in zip(unit.nodes, ways) if way}
        return times if len(times) == len(unit.nodes) else None

    def _copy_bytes(self, unit: Unit, option: Option, taken: Taken) -> int:
        """A reader's own copy of the weights, where no other unit of its model can have the same."""
        kin = [u.name for u in self.space.units if u.model == unit.model and u is not unit]
        lie = {u.name: (o.pp, o.dp, o.tp) for u, o in taken}
        mine = option.pp, option.dp, option.tp
        return option.copy_bytes if all(lie.get(name, mine) != mine for name in kin) else 0


def _alone(unit: Unit, option: Option) -> dict[str, float]:
    return {node.name: ways.least_s + option.swap_s for node, ways in zip(unit.nodes, option.ways)}


def all_options(space: Space, unit: Unit) -> tuple[Option, ...]:
    """The options of a unit on all numbers of devices that a pin may give it, the fastest first."""
    draft = space.draft
    if unit.name in space.pinned:
        count = len(space.pinned[unit.name])
        return draft.candidates[unit.name].get(count, ())
    found = [option for options in draft.candidates[unit.name].values() for option in options]
    for count in _other_counts(space, unit):
        pin = Pin(unit.nodes[0].name, (), tuple(range(count)), "")
        pinned = replace(draft, pins=(*draft.pins, pin))
        found += [option for options in options_of(pinned, unit).values() for option in options]
    return tuple(sorted(found, key=lambda option: option.least_s))


def _other_counts(space: Space, unit: Unit) -> Iterator[int]:
    """Numbers of devices that are no candidates, but that layers, heads and rows may be divided over."""
    draft, shape = space.draft, space.draft.shapes[unit.model]
    rows = gcd(*(gcd(work.rows, work.rows_per_update) for work in unit.works))
    heads, most = gcd(shape.num_heads, shape.num_kv_heads), space.num_devices
    parts = (_divisors(number, most) for number in (shape.num_layers, heads, rows))
    counts = {pp * tp * dp for pp, tp, dp in product(*parts)}
    known = {*sizes(draft.cluster), *draft.candidates[unit.name]}
    yield from sorted(count for count in counts - known if count <= most)


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]
