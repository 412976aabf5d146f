"""Planned and measured time lines in Chrome's trace format, for ui.perfetto.dev.

The format is the *Trace Event Format* (complete events, ``"ph": "X"``, microseconds). The plan and the
run are two processes. Threads are devices; of a plan for many, sets of devices that do the same. What is not
a node (transfers, weights, what goes to and from the host's memory) has a thread of its own beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hflow import units
from hflow.plan.plan import Plan
from hflow.view.timeline import Track, measured_tracks, steps_tracks

PLANNED, MEASURED = 1, 2
PLANNED_STEPS = 3
SINGLE_DEVICES = 16  # a plan of at most so many shows each alone


def chrome_trace(plan: Plan, events: Sequence[Mapping[str, Any]] = ()) -> str:
    """JSON text of a trace: a planned step beside every measured one, or without a run three planned ones."""
    starts = _step_starts(events)
    out: list[dict[str, Any]] = []
    if not starts:
        out += _complete(_planned(plan, PLANNED_STEPS), PLANNED)
    for step, start in starts.items():
        out += _complete(_planned(plan, 1), PLANNED, start, step)
        out += _complete(measured_tracks(events, step), MEASURED, start)
    return json.dumps({"traceEvents": [*_names(out), *out], "displayTimeUnit": "ms"})


def _planned(plan: Plan, steps: int) -> Iterable[Track]:
    found = steps_tracks(plan.step, steps)
    if len(plan.devices) > SINGLE_DEVICES:
        return found
    return [replace(track, devices=(device,)) for track in found for device in track.devices]


def _step_starts(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds from the first event of the run to the first of each step."""
    first: dict[int, float] = {}
    for event in events:
        step = int(event["step"])
        first[step] = min(first.get(step, event["start_s"]), event["start_s"])
    zero = min(first.values(), default=0.0)
    return {step: first[step] - zero for step in sorted(first)}


def _complete(
    tracks: Iterable[Track], process: int, start_s: float = 0.0, first_step: int = 0
) -> list[dict[str, Any]]:
    """The events of all bars. `start_s` and `first_step` are added to theirs."""
    return [
        {
            "name": bar.name,
            "cat": bar.kind,
            "ph": "X",
            "ts": round((start_s + bar.start_s) * 1e6, 3),
            "dur": round(bar.seconds * 1e6, 3),
            "pid": process,
            "tid": 2 * track.devices[0] + (bar.kind != "call"),
            "args": {"step": first_step + bar.step, "devices": units.devices(track.devices)},
        }
        for track in tracks
        for bar in track.bars
    ]


def _names(events: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Metadata events that name the processes and threads that occur."""
    threads = {(e["pid"], e["tid"]): e["args"]["devices"] for e in events}
    for pid in sorted({pid for pid, _ in threads}):
        name = "planned" if pid == PLANNED else "measured"
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    for (pid, tid), devices in sorted(threads.items()):
        name = f"device {devices}" + (" transfers" if tid % 2 else "")
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
