"""What the nodes of a run took, beside what its plan predicted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

from hflow.bounded_read import UnreadableError, parse_json, read_text
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.plan import Plan
from hflow.plan.workload import rounds

Metrics = Mapping[str, Any]
_REPLANNED = re.compile(r'"event": "(resumed|replanned)"')
MAX_RUN_BYTES = 2**30  # of one file of a run folder
OFF = 0.25  # predicted and measured times further apart than this are flagged,
WORTH = 0.05  # where they differ by more than this part of the step


@dataclass(frozen=True)
class Compared:
    """A node's seconds per step; `is_off`: the prediction missed by more than 25 %, and that matters."""

    name: str
    predicted_s: float
    measured_s: float
    is_off: bool

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, or None when nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else None


def read_metrics(run: Path, plan: Plan) -> list[Metrics]:
    """The lines of a run folder's ``metrics.jsonl``: those of the steps that it made under `plan`.

    Raises:
        HflowError: HF407 when the folder is none of a run or no step has ended, HF306 when the run executed
            other plans.
    """
    try:
        events, lines = (
            read_text(run / n, MAX_RUN_BYTES).splitlines() for n in ("events.jsonl", "metrics.jsonl")
        )
        executed = _executed(events)
    except (UnreadableError, LookupError, TypeError):
        raise HflowError(Diagnostic("HF407", f"`{run}` is no run folder")) from None
    if plan.hash not in executed.values():
        message = f"`{run}` is a run of plan {', then '.join(executed.values())}, not of {plan.hash}"
        raise HflowError(Diagnostic("HF306", message, help=f"its plan is `{run / 'plan.json'}`"))
    if not lines:
        raise HflowError(Diagnostic("HF407", f"`{run}` has no finished step to compare with"))
    found = [_metrics(run, number, line) for number, line in enumerate(lines, 1)]
    if len(executed) == 1:
        return found
    return [line for line in found if _plan_of(int(line["step"]), executed) == plan.hash]


def _executed(events: Sequence[str]) -> dict[int, str]:
    """The hash of each plan of a run by the step that it began with, in order, of lines of its
    ``events.jsonl``: those that later events have replaced have no steps."""
    found = {0: cast("str", parse_json(events[0])["plan"])}
    for line in (line for line in events if _REPLANNED.search(line) and line.endswith("}")):
        event = parse_json(line)
        step = int(event.get("step", 0))
        found = {began: plan for began, plan in found.items() if began < step} | {step: event["plan"]}
    return found


def _plan_of(step: int, executed: Mapping[int, str]) -> str:
    return executed[max(began for began in executed if began <= step)]


def _metrics(run: Path, number: int, line: str) -> Metrics:
    """One line; the last of a run that was killed, or whose disk was full, may be a part of one."""
    try:
        found = parse_json(line)
    except UnreadableError as error:
        raise HflowError(
            Diagnostic("HF407", f"line {number} of `{run / 'metrics.jsonl'}`: {error}")
        ) from None
    if not isinstance(found, dict):
        message = f"line {number} of `{run / 'metrics.jsonl'}` is no JSON object"
        raise HflowError(Diagnostic("HF407", message))
    return cast("Metrics", found)


def compare(plan: Plan, metrics: Sequence[Metrics]) -> list[Compared]:
    """Every node that was measured, in plan order.

    A plan predicts the least number of rounds of a region. For as many as were run, a node's time is the
    predicted one of a round times their number.

    Args:
        metrics: the lines of ``metrics.jsonl``, one per step.
    """
    measured = measured_times(metrics)
    planned = [n for n in plan.nodes if n.node in measured]
    times = [(n.node, n.time_s * _rounds_run(plan, n.node, metrics), measured[n.node]) for n in planned]
    step_s = max(sum(p for _, p, _ in times), sum(m for _, _, m in times))
    return [Compared(name, p, m, _is_off(p, m) and abs(m - p) > WORTH * step_s) for name, p, m in times]


def total(nodes: Sequence[Compared]) -> Compared:
    """The sum over nodes."""
    predicted, measured = sum(n.predicted_s for n in nodes), sum(n.measured_s for n in nodes)
    return Compared("sum", predicted, measured, _is_off(predicted, measured))


def measured_times(metrics: Sequence[Metrics]) -> dict[str, float]:
    """Median seconds of each node over the steps; the first step warms up and counts only if alone."""
    prefix = "time_s."
    names = sorted({name for line in _warm(metrics) for name in line if name.startswith(prefix)})
    return {name.removeprefix(prefix): _median(name, metrics) for name in names}


def _rounds_run(plan: Plan, name: str, metrics: Sequence[Metrics]) -> float:
    """Rounds per step in which a node ran, for each that was predicted; 1 outside regions. Steps for which
    enough rows had waited do not count."""
    node = plan.graph.node(name)
    key = f"{node.name if node.op == 'repeat' else node.region}.rounds"
    ran = [line for line in metrics if line.get(key)]
    return _median(key, ran) / rounds(plan.graph, node) if ran else 1.0


def _median(name: str, metrics: Sequence[Metrics]) -> float:
    return median(line[name] for line in _warm(metrics) if name in line)


def _warm(metrics: Sequence[Metrics]) -> Sequence[Metrics]:
    return metrics[1:] or metrics


def _is_off(predicted_s: float, measured_s: float) -> bool:
    return abs(measured_s - predicted_s) > OFF * predicted_s
