"""Planned and measured time lines in Chrome's trace format, for ui.perfetto.dev.

The format is the *Trace Event Format* (complete events, ``"ph": "X"``, microseconds). The plan and the
run are two processes, devices are threads; what is not a node (transfers) has a thread of its own,
because overlapping events of one thread are not drawn correctly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hflow.compiler.plan import Plan
from hflow.view.timeline import Bar, measured_bars, planned_bars

PLANNED, MEASURED = 1, 2


def chrome_trace(plan: Plan, events: Sequence[Mapping[str, Any]] = ()) -> str:
    """JSON text of a trace: the planned step beside every measured one, or alone."""
    starts = _step_starts(events) or {0: 0.0}
    out: list[dict[str, Any]] = []
    for step, start in starts.items():
        out += _complete(planned_bars(plan), PLANNED, step, start)
        out += _complete(measured_bars(events, step), MEASURED, step, start)
    return json.dumps({"traceEvents": [*_names(out), *out], "displayTimeUnit": "ms"})


def _step_starts(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds from the first event of the run to the first of each step."""
    first: dict[int, float] = {}
    for event in events:
        step = int(event["step"])
        first[step] = min(first.get(step, event["start_s"]), event["start_s"])
    zero = min(first.values(), default=0.0)
    return {step: first[step] - zero for step in sorted(first)}


def _complete(bars: Iterable[Bar], process: int, step: int, start_s: float) -> list[dict[str, Any]]:
    return [
        {
            "name": bar.name,
            "cat": bar.kind,
            "ph": "X",
            "ts": round((start_s + bar.start_s) * 1e6, 3),
            "dur": round((bar.end_s - bar.start_s) * 1e6, 3),
            "pid": process,
            "tid": 2 * bar.device + (bar.kind != "call"),
            "args": {"step": step},
        }
        for bar in bars
    ]


def _names(events: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Metadata events that name the processes and threads that occur."""
    threads = sorted({(e["pid"], e["tid"]) for e in events})
    for pid in sorted({pid for pid, _ in threads}):
        name = "planned" if pid == PLANNED else "measured"
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    for pid, tid in threads:
        name = f"device {tid // 2}" + (" transfers" if tid % 2 else "")
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
