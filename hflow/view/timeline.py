"""Bars on a time line per device: what a plan predicts, and what a run measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.compiler.plan import NodePlan, Plan
from hflow.compiler.workload import rounds


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
    """One bar per call of a node and device, in seconds from the start of the step."""
    return tuple(
        Bar(device, node.node, "call", start, end)
        for node in plan.nodes
        for start, end in planned_calls(plan, node)
        for device in sorted(node.mesh.devices)
    )


def planned_calls(plan: Plan, node: NodePlan) -> list[tuple[float, float]]:
    """Start and end of each of a node's calls in a step: one, or one per round of its region.

    A round begins on a device as soon as the one before has ended there, so rounds follow each other at the
    pace of the device that needs longest for one.
    """
    graph = plan.graph
    declared = graph.node(node.node)
    num_calls = rounds(graph, declared)
    region = declared.name if declared.op == "repeat" else declared.region
    pace = _round_s(plan, region, num_calls) if num_calls > 1 else 0.0
    starts = [node.start_s + pace * i for i in range(num_calls)]
    return [(start, start + node.time_s / num_calls) for start in starts]


def _round_s(plan: Plan, region: str, num_rounds: int) -> float:
    """Seconds from the first start to the last end of a round, on the device where that is longest."""
    members = [*(n.name for n in plan.graph.inside(region)), region]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for node in map(plan.node, members):
        for device in node.mesh.devices:
            end = node.start_s + node.time_s / num_rounds
            first[device] = min(first.get(device, node.start_s), node.start_s)
            last[device] = max(last.get(device, end), end)
    return max(last[device] - first[device] for device in first)


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
