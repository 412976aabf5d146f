"""Weights that come to a reader from its trainer, because they lie otherwise on its devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hflow.compiler.candidates.node_groups import Unit
from hflow.compiler.planner.seats import Seat, sharding_of
from hflow.compiler.state import Draft
from hflow.cost.redistribution import weights_s
from hflow.plan.sharding import Sharding

Copy = tuple[str, Sharding, int, int, bool]  # of a model: how and where it lies, its lag, whether in flight


@dataclass(frozen=True)
class Renewal:
    """`reader`: the first node of the unit that reads. `lies`: how, as if `first` were the first of all.
    `seconds`: of the transfer."""

    reader: str
    unit: Unit
    lies: Sharding
    first: int
    seconds: float
    copy_bytes: int

    @cached_property
    def copy(self) -> Copy:
        """Readers of equal copies share one."""
        return self.unit.model, self.lies, self.first, self.unit.lag, self.unit.nodes[0].in_flight


class Renewals:
    """Those of one draft, each found out once, as if the first host of both were the first of all: hosts are
    alike."""

    def __init__(self, draft: Draft):
        self.draft = draft
        self._known: dict[object, Renewal | None] = {}
        self._of_first: dict[object, Renewal | None] = {}
        self._seats: dict[tuple[int, int], Seat] = {}

    def of(self, unit: Unit, seat: Seat, trainer: Seat, reader: str) -> Renewal | None:
        """None where the weights lie as the reader needs them."""
        options = id(seat.option), id(trainer.option)  # of the draft, which lives as long as this
        key = reader, *options, seat.devices[0], trainer.devices[0]
        if key not in self._known:
            self._known[key] = self._renewal(unit, seat, trainer, reader)
        return self._known[key]

    def _renewal(self, unit: Unit, seat: Seat, trainer: Seat, reader: str) -> Renewal | None:
        per_host = self.draft.cluster.devices_per_host
        first = min(seat.devices[0], trainer.devices[0]) // per_host * per_host
        options = id(seat.option), id(trainer.option)
        key = reader, *options, seat.devices[0] - first, trainer.devices[0] - first
        if key not in self._of_first:
            moved = self._moved(seat, first), self._moved(trainer, first)
            self._of_first[key] = self._on_first(unit, *moved, reader)
        found = self._of_first[key]
        return replace(found, first=first) if found and first else found

    def _on_first(self, unit: Unit, seat: Seat, trainer: Seat, reader: str) -> Renewal | None:
        held, lies = trainer.option.sharding(trainer.mesh), sharding_of(unit, seat, trainer)
        if lies == held and not unit.lag:
            return None
        draft = self.draft
        model = draft.graph.model(unit.model)
        seconds = weights_s(draft.shapes[unit.model], model.dtype, held, lies, draft.cluster)
        newest = seat.option.idle_bytes if unit.evaluated and lies != held else 0  # beside its older copy
        copy_bytes = newest if unit.lag else seat.option.copy_bytes
        return Renewal(reader, unit, lies, 0, seconds, copy_bytes)

    def _moved(self, seat: Seat, first: int) -> Seat:
        """As if device `first` were the first of all."""
        key = id(seat.option), seat.devices[0] - first
        if key not in self._seats:
            self._seats[key] = replace(seat, devices=tuple(device - first for device in seat.devices))
        return self._seats[key]
