"""The least memory with which any plan does, and the plan that needs it: not how fast it is.

What a device of a set holds at most is what stays there of all units, and what the neediest node needs beside
it. So of the options of a unit only those count that no other beats in both, and of two units together again
only those pairs. Generation on all devices while its model lies on a part of them is left out: sets of all
models on all devices, which need least as a rule, contain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce

from hflow.compiler.candidates.node_groups import Option, Unit
from hflow.compiler.planner.placements import Partition
from hflow.compiler.planner.space import Space


@dataclass(frozen=True)
class Held:
    """What a unit in one of its options holds on a device: `idle_bytes` always, and `need_bytes` beside that
    while its neediest node runs; both with its own copy of weights, if it has one."""

    unit: Unit
    option: Option
    idle_bytes: int
    need_bytes: int


@dataclass(frozen=True)
class Load:
    """What lies on each device of a set: `idle_bytes` always, and at most `need_bytes` beside that."""

    idle_bytes: int
    need_bytes: int
    held: tuple[Held, ...]

    @property
    def peak_bytes(self) -> int:
        return self.idle_bytes + self.need_bytes

    @property
    def neediest(self) -> Held:
        return max(self.held, key=lambda held: held.need_bytes)


@dataclass(frozen=True)
class Lean:
    """A partition of the models, the number of devices of each set and what lies on them."""

    partition: Partition
    counts: tuple[int, ...]
    loads: tuple[Load, ...]

    @property
    def fullest(self) -> Load:
        return max(self.loads, key=lambda load: load.peak_bytes)


Ladder = Sequence[tuple[int, Load]]  # more and more devices, with less and less on each


def leanest(space: Space) -> Lean | None:
    """The plan whose fullest device holds least; None where the placement asks for more devices than there
    are. No unit of `space` is pinned to devices."""

    @cache
    def ladder(members: tuple[str, ...]) -> tuple[tuple[int, Load], ...]:
        return tuple(_ladder(space, members))

    found = (_shared_out(list(map(ladder, p)), p, space.num_devices) for p in space.partitions())
    return min(filter(None, found), key=lambda plan: plan.fullest.peak_bytes, default=None)


def _shared_out(ladders: Sequence[Ladder], partition: Partition, total: int) -> Lean | None:
    """Sets begin with the fewest devices; whichever holds most gets more, as long as there are any."""
    steps, best = [0] * len(ladders), None
    while True:
        counts, loads = zip(*(ladder[step] for ladder, step in zip(ladders, steps)))
        if sum(counts) > total:
            return best
        best = Lean(partition, counts, loads)
        fullest = loads.index(best.fullest)
        steps[fullest] += 1
        if steps[fullest] == len(ladders[fullest]):
            return best


def _ladder(space: Space, members: tuple[str, ...]) -> Iterator[tuple[int, Load]]:
    best: Load | None = None
    for count in space.sizes(members):
        least = min(_of_models(space, members, count), key=lambda load: load.peak_bytes)
        if best is None or least.peak_bytes < best.peak_bytes:
            best = least
            yield count, least


def _of_models(space: Space, members: Iterable[str], count: int) -> list[Load]:
    return reduce(_together, (_of_model(space, model, count) for model in members))


def _of_model(space: Space, model: str, count: int) -> list[Load]:
    units = space.free_units((model,))
    trainer = next((u for u in units if u.role == "train"), None)
    if trainer is None:
        return reduce(_together, (_alone(u, space.options(u.name, count)) for u in units))
    readers = [u for u in units if u is not trainer]
    copies = [_alone(u, space.options(u.name, count)) for u in readers]
    found: list[Load] = []
    for option in space.options(trainer.name, count):
        loads = [_load(trainer, option)]
        for unit, own in zip(readers, copies):
            shared = (o for o in space.options(unit.name, count) if not unit.lag and _alike(o, option))
            loads = _together(loads, [*own, *(_load(unit, o) for o in shared)])
        found += loads
    return _undominated(found)


def _alone(unit: Unit, options: Iterable[Option]) -> list[Load]:
    """A copy of weights that are trained elsewhere stays where several nodes read it. Beside a server of
    older weights there is another, which evaluates the newest."""
    stays = len(unit.nodes) > 1
    twice = unit.served and unit.evaluated and unit.lag > 0
    return _undominated(
        _load(unit, o, o.copy_bytes * stays + o.idle_bytes * twice, o.copy_bytes * (not stays))
        for o in options
    )


def _load(unit: Unit, option: Option, staying: int = 0, passing: int = 0) -> Load:
    """`staying`, `passing`: bytes of its own copy of weights, there always or while a node runs."""
    idle, need = option.idle_bytes + staying, option.least_bytes + passing
    return Load(idle, need, (Held(unit, option, idle, need),))


def _alike(reader: Option, trainer: Option) -> bool:
    """Whether a reader uses the trainer's own weights."""
    mine, theirs = ((o.pp, o.dp, o.tp, o.strategy.ep) for o in (reader, trainer))
    return mine == theirs


def _together(some: Iterable[Load], others: Sequence[Load]) -> list[Load]:
    return _undominated(
        Load(a.idle_bytes + b.idle_bytes, max(a.need_bytes, b.need_bytes), (*a.held, *b.held))
        for a in some
        for b in others
    )


def _undominated(loads: Iterable[Load]) -> list[Load]:
    kept: list[Load] = []
    for load in sorted(loads, key=lambda load: (load.need_bytes, load.idle_bytes)):
        if not kept or load.idle_bytes < kept[-1].idle_bytes:
            kept.append(load)
    return kept
