"""HybridFlow's parallel sizes of models (arXiv:2409.19256, Algorithm 2 and get_min_alloc of Algorithm 1).

A model has one (p, t, d) for training and scoring, in Megatron's plain data parallelism: no ZeRO, no offload,
and recomputation only where memory asks for it. What the paper leaves open is read so:

- the minimal sizes of models that share devices are those on the fewest that hold one replica of each;
- p and t grow in steps of 1, so those that divide nothing (heads, layers, devices, rows) are skipped; a model
  that cannot use all devices of its set uses the most that it can;
- p goes up to devices / devices per host, or its minimum where that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hflow.compiler.candidates.meshes import sizes
from hflow.compiler.candidates.node_groups import Option, Options, Unit
from hflow.compiler.planner.memoize import kept
from hflow.compiler.planner.published.seating import options_with
from hflow.compiler.planner.published.stages import StageTimes, in_turn, stage_times
from hflow.compiler.planner.space import Space

Members = tuple[str, ...]  # models
Admits = Callable[[Option, Option], bool]  # a layout of training, one of generation


def nested(train: Option, generate: Option) -> bool:
    """Generation on the same devices, with a tensor parallelism that divides that of training. Of the layouts
    that HybridFlow's engine knows these are the ones without stages."""
    return train.num_devices == generate.num_devices and train.tp % generate.tp == 0


@dataclass(frozen=True)
class Least:
    """The fewest devices that hold a set of models: `count`; there each has the `sizes` (p, t), and what they
    keep leaves `room_bytes` for a node that runs."""

    count: int
    sizes: Mapping[str, tuple[int, int]]
    room_bytes: int


@dataclass(frozen=True)
class Mapped:
    """The options of the units of some models on the same devices, and what they take in each stage."""

    options: Mapping[str, Option]
    times: StageTimes


class Mapper:
    """Algorithm 2, with its answers kept.

    Args:
        generation: the options of units that generate with a trained model.
        admits: which of them go with which of training.
    """

    def __init__(self, space: Space, generation: Mapping[str, Options], admits: Admits = nested):
        self.space, self.admits, self.rounds = space, admits, space.model.rounds
        self.capacity = space.draft.cluster.device.usable_bytes
        others = [u for u in space.units if u.role != "generate"]
        self.options = {**options_with(space.draft, others, zero=0, offload=False), **generation}

    def sizes(self, members: Members) -> tuple[int, ...]:
        """Numbers of devices that make a difference to a set of models: the least allocation and more."""
        least, found = self.least(members), {n for m in members for n in self.options[self._main(m).name]}
        return tuple(sorted(n for n in found if least and n >= least.count))

    @kept
    def least(self, members: Members) -> Least | None:
        """The least allocation (get_min_alloc); None where the models fit nowhere."""
        for count in sizes(self.space.draft.cluster):
            whole = {m: o for m in members if (o := self._one_replica(m, count))}
            room = self.capacity - sum(o.idle_bytes for o in whole.values())
            if len(whole) == len(members) and all(self._mapped(m, o, room) for m, o in whole.items()):
                return Least(count, {m: (o.pp, o.tp) for m, o in whole.items()}, room)
        return None

    @kept
    def on(self, members: Members, count: int) -> Mapped | None:
        """A set of models on `count` devices: training first, then generation in the memory that is left."""
        least = self.least(members)
        if not least or count < least.count:
            return None
        mains = {m: self._auto_parallel(m, count, least.sizes[m], least.room_bytes) for m in members}
        room = self.capacity - sum(o.idle_bytes for o in mains.values())
        found = [mapped for m, o in mains.items() if (mapped := self._mapped(m, o, room))]
        if len(found) < len(members):
            return None
        options = {name: option for mapped in found for name, option in mapped.options.items()}
        return Mapped(options, in_turn(mapped.times for mapped in found))

    @kept
    def _auto_parallel(self, model: str, count: int, least: tuple[int, int], room_bytes: int) -> Option:
        """Of training and scoring on at most `count` devices, with p and t no less than `least` (p, t)."""
        per_host = self.space.draft.cluster.devices_per_host
        options = self.options[self._main(model).name]
        for n in sorted((n for n in options if n <= count), reverse=True):
            layouts = (o for o in options[n] if least[0] <= o.pp <= max(least[0], n // per_host))
            found = [(o, self._mapped(model, o, room_bytes)) for o in layouts if o.tp >= least[1]]
            times = [(sum(mapped.times[1:]), i) for i, (_, mapped) in enumerate(found) if mapped]
            if times:
                return found[min(times)[1]][0]
        raise AssertionError(f"{model} fits on its least devices, so on {count}")

    def _one_replica(self, model: str, count: int) -> Option | None:
        """All of `count` devices for one replica, with as much tensor parallelism as possible."""
        options = self.options[self._main(model).name].get(count, ())
        return max((o for o in options if o.dp == 1), key=lambda o: o.tp, default=None)

    def _mapped(self, model: str, main: Option, room_bytes: int) -> Mapped | None:
        """The model trained (or, if frozen, used) as `main` says, with its fastest generation; None where a
        node cannot run so."""
        options, times = dict[str, Option](), list[StageTimes]()
        for unit in (u for u in self.space.units if u.model == model):
            fits = (
                (own, option)
                for option in self._alternatives(unit, main)
                if (own := stage_times(unit, option, room_bytes - _more(option, main), self.rounds))
            )
            best = min(fits, key=lambda fit: sum(fit[0]), default=None)
            if best is None:
                return None
            times.append(best[0])
            options[unit.name] = best[1]
        return Mapped(options, in_turn(times))

    def _alternatives(self, unit: Unit, main: Option) -> Iterator[Option]:
        if unit == self._main(unit.model):
            yield main
            return
        for option in self.options[unit.name].get(main.num_devices, ()):
            if self.admits(main, option) if unit.role == "generate" else _alike(main, option):
                yield option

    def _main(self, model: str) -> Unit:
        """The unit that trains a model, or the only one of a frozen one."""
        return next(u for u in self.space.units if u.model == model and u.role in ("train", "frozen"))


def _alike(one: Option, other: Option) -> bool:
    return (one.pp, one.dp, one.tp) == (other.pp, other.dp, other.tp)


def _more(option: Option, main: Option) -> int:
    """What a unit keeps beside its model's state: older weights, or a copy in a layout of its own."""
    if option is main:
        return 0
    return option.idle_bytes + (0 if _alike(option, main) else option.copy_bytes)
