"""Bars on a time line: what a plan predicts of sets of devices, and what a run measured of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hflow.plan.plan import Plan
from hflow.plan.program import Program
from hflow.schedule.task_times import WARM_UP
from hflow.schedule.timed_span import TimedSpan, spans
from hflow.view.words import deed


@dataclass(frozen=True)
class Bar:
    """`name` (a node, or what is moved) takes from `start_s` to `end_s`. `kind`: the instruction's `op`;
    `node`: the one that runs, or for which something is moved."""

    name: str
    kind: str
    start_s: float
    end_s: float
    node: str = ""
    step: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Track:
    """Devices that do the same things at the same times, as one line of bars."""

    devices: tuple[int, ...]
    bars: tuple[Bar, ...]


def steps_tracks(program: Program, steps: int = 1) -> tuple[Track, ...]:
    """What happens in so many steps after a standstill, in seconds from the start of the first."""
    return _planned(program, spans(program, steps))


def steady_tracks(plan: Plan, steps: int = 1) -> tuple[Track, ...]:
    """What happens in so many periods of a long run, in seconds from the start of a step; bars of the steps
    before and after are cut off where the periods begin and end."""
    found = spans(plan.step, WARM_UP + steps + 1)
    start = min((s.start_s for s in found if s.step == WARM_UP), default=0.0)
    end = start + steps * plan.step_time_s
    inside = [s for s in found if s.end_s > start and s.start_s < end]
    cut = [replace(s, start_s=max(s.start_s, start) - start, end_s=min(s.end_s, end) - start) for s in inside]
    return _planned(plan.step, cut)


def measured_tracks(events: Iterable[Mapping[str, Any]], step: int) -> tuple[Track, ...]:
    """The events of one step, in seconds from its first."""
    own = sorted((e for e in events if e["step"] == step), key=lambda e: e["start_s"])
    zero = min((e["start_s"] for e in own), default=0.0)
    bars = [Bar(e["name"], e["kind"], e["start_s"] - zero, e["end_s"] - zero, e["name"], step) for e in own]
    return _tracks(bars, [(e["device"],) for e in own])


def last_step(events: Iterable[Mapping[str, Any]]) -> int | None:
    return max((int(e["step"]) for e in events), default=None)


def end_s(tracks: Sequence[Track]) -> float:
    return max((bar.end_s for track in tracks for bar in track.bars), default=0.0)


def _planned(program: Program, found: Iterable[TimedSpan]) -> tuple[Track, ...]:
    """What takes time, by the devices that do it."""
    shown = [s for s in found if s.end_s > s.start_s]
    shown.sort(key=lambda s: (s.start_s, s.end_s))
    bars = [
        Bar(deed(program, i), i.op, s.start_s, s.end_s, i.node, s.step)
        for s, i in ((s, s.instruction) for s in shown)
    ]
    return _tracks(bars, [s.instruction.devices for s in shown])


def _tracks(bars: Sequence[Bar], devices: Sequence[tuple[int, ...]]) -> tuple[Track, ...]:
    """Bars, in order, and the devices of each: devices of the same bars share a track."""
    numbers: dict[int, list[int]] = {}
    for number, users in enumerate(devices):
        for device in users:
            numbers.setdefault(device, []).append(number)
    alike: dict[tuple[int, ...], list[int]] = {}
    for device in sorted(numbers):
        alike.setdefault(tuple(numbers[device]), []).append(device)
    return tuple(Track(tuple(users), tuple(bars[n] for n in same)) for same, users in alike.items())
