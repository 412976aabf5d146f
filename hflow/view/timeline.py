"""Bars on a time line per device: what a plan predicts, and what a run measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.compiler.plan import Plan


@dataclass(frozen=True)
class Bar:
    """`name` (a node, or a transfer) occupies `device` from `start_s` to `end_s`."""

    device: int
    name: str
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Track:
    """Devices that do the same things at the same times, as one line of bars."""

    devices: tuple[int, ...]
    bars: tuple[Bar, ...]


def planned_bars(plan: Plan) -> tuple[Bar, ...]:
    """One bar per node and device, in seconds from the start of the step."""
    return tuple(
        Bar(device, node.node, "call", node.start_s, node.start_s + node.time_s)
        for node in plan.nodes
        for device in sorted(node.mesh.devices)
    )


def measured_bars(events: Iterable[Mapping[str, Any]], step: int) -> tuple[Bar, ...]:
    """The events of one step, in seconds from its first."""
    own = [e for e in events if e["step"] == step]
    zero = min((e["start_s"] for e in own), default=0.0)
    return tuple(
        Bar(e["device"], e["name"], e["kind"], e["start_s"] - zero, e["end_s"] - zero)
        for e in sorted(own, key=lambda e: (e["device"], e["start_s"]))
    )


def last_step(events: Iterable[Mapping[str, Any]]) -> int | None:
    return max((int(e["step"]) for e in events), default=None)


def tracks(bars: Sequence[Bar]) -> tuple[Track, ...]:
    """Bars by device; devices with equal bars share a track."""
    alike: dict[tuple[tuple[str, str, float, float], ...], list[int]] = {}
    for device in sorted({b.device for b in bars}):
        own = sorted((b for b in bars if b.device == device), key=lambda b: (b.start_s, b.end_s))
        alike.setdefault(tuple((b.name, b.kind, b.start_s, b.end_s) for b in own), []).append(device)
    return tuple(
        Track(tuple(devices), tuple(Bar(devices[0], *what) for what in same))
        for same, devices in alike.items()
    )


def idle_fraction(bars: Sequence[Bar]) -> float:
    """The part of all devices' time, up to the last bar's end, in which no node runs on them."""
    num_devices = len({b.device for b in bars})
    end = max((b.end_s for b in bars), default=0.0)
    if not end:
        return 0.0
    busy = sum(b.end_s - b.start_s for b in bars if b.kind == "call")
    return max(0.0, 1 - busy / (num_devices * end))
