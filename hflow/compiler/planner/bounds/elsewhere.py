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
from dataclasses import replace
from functools import partial
from itertools import product
from math import gcd

from hflow.compiler.candidates.meshes import options_of, sizes
from hflow.compiler.candidates.node_groups import Option, Unit
from hflow.compiler.pins import Pin
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.space import Space

EFFORT = 3000  # bounds, of about 0.05 ms; what they leave open counts as shorter
Taken = tuple[tuple[Unit, Option], ...]


def unsearched(space: Space, limit_s: float) -> tuple[Unit, ...]:
    """The units that are on a part of the devices in some plan which is not in the space and, as far as
    bounds tell, may take less than `limit_s`; those that generate come first."""
    free = sorted(
        (unit for unit in space.units if unit.name not in space.pinned),
        key=lambda unit: unit.role != "generate",
    )
    if not free or space.num_devices == 1:
        return ()
    if all(len(partition) > 1 for partition in space.partitions()):
        return tuple(free)  # that all models share all devices is not admitted
    elsewhere = _Elsewhere(space, limit_s)
    return tuple(unit for unit in free if elsewhere.admits(unit))


def pin_apart(space: Space, unit: Unit) -> str:
    """A pin that puts `unit` on the last of the devices, at most half of them: ``rollout=@8-15``."""
    total = space.num_devices
    few = [count for count in space.draft.candidates[unit.name] if 2 * count <= total]
    first = total - max(few, default=1)
    return f"{unit.nodes[0].name}=@{first}" + (f"-{total - 1}" if first < total - 1 else "")


class _Elsewhere:
    """Plans that take less than `limit_s`, wherever units are. `least_s` of each node, `least_work` of each
    unit's devices together; `least_ring_s`: with the least times; `effort`: bounds so far."""

    def __init__(self, space: Space, limit_s: float):
        self.space, self.limit_s, self.effort = space, limit_s, 0
        self.total, self.usable = space.num_devices, space.draft.cluster.device.usable_bytes
        self.bounds = Bounds(space.draft)
        self.options = {unit.name: all_options(space, unit) for unit in space.units}
        self.places = {node.name: (i,) for i, unit in enumerate(space.units) for node in unit.nodes}
        alone = {u.name: [_alone(u, o) for o in self.options[u.name]] for u in space.units}
        self.least_s = {
            node.name: min(times[node.name] for times in alone[unit.name])
            for unit in space.units
            for node in unit.nodes
        }
        self.least_work = {
            unit.name: min(map(partial(self._work, unit), self.options[unit.name], alone[unit.name]))
            for unit in space.units
        }
        self.least_ring_s = self.bounds.step_s(self.least_s, self.places)

    def admits(self, apart: Unit) -> bool:
        """Whether there may be one with `apart` on a part of the devices."""
        others = [unit for unit in self.space.units if unit is not apart]
        others.sort(key=lambda unit: -self.options[unit.name][0].least_s)
        few = [option for option in self.options[apart.name] if option.num_devices < self.total]
        return any(self._completes((), apart, option, others) for option in few)

    def _completes(self, taken: Taken, unit: Unit, option: Option, left: Sequence[Unit]) -> bool:
        """Whether with `option` of `unit` as well, and any of all units that are left, one may be."""
        self.effort += 1
        if self.effort > EFFORT:
            return True
        both = (*taken, (unit, option))
        if self._bound_s(both) >= self.limit_s:
            return False
        if not left:
            return True
        following, *others = left
        return any(self._completes(both, following, each, others) for each in self.options[following.name])

    def _bound_s(self, taken: Taken) -> float:
        """The least time of plans with these options, or a number below `limit_s`."""
        times: dict[str, float] = {}
        for unit, option in taken:
            own = self._times(unit, option, taken)
            if own is None:
                return float("inf")
            times.update(own)
        work = {**self.least_work, **{unit.name: self._work(unit, option, times) for unit, option in taken}}
        busy_s = sum(work.values()) / self.total
        more_s = sum((s - self.least_s[name]) * self.bounds.rounds[name] for name, s in times.items())
        if busy_s >= self.limit_s or self.least_ring_s + more_s < self.limit_s:  # no ring gets longer than so
            return busy_s
        return max(busy_s, self.bounds.step_s({**self.least_s, **times}, self.places))

    def _work(self, unit: Unit, option: Option, times: Mapping[str, float]) -> float:
        """Seconds of all devices together."""
        rounds = self.bounds.rounds
        return option.num_devices * sum(times[node.name] * rounds[node.name] for node in unit.nodes)

    def _times(self, unit: Unit, option: Option, taken: Taken) -> dict[str, float] | None:
        """Of the unit's nodes, in the memory that others leave at most on its fullest device."""
        others = [o for u, o in taken if u is not unit]
        shared = [max(0, option.num_devices + o.num_devices - self.total) for o in others]
        beside = sum(o.idle_bytes * count for o, count in zip(others, shared)) // option.num_devices
        room = self.usable - option.idle_bytes - beside - self._copy_bytes(unit, option, taken)
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
