"""The best value that a run has reached, and of what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hflow.diagnostics import HflowError
from hflow.graph.run_config import CheckpointPolicy
from hflow.graph.run_file import FILE, read_run_config
from hflow.report.run_status import SummaryFile


def best_score(
    run: Path, summary: SummaryFile | None, metrics: Sequence[Mapping[str, Any]], evaluated: str
) -> tuple[float | None, str]:
    """By the metric that decides which checkpoint is the best, where the run's `run.yaml` names one; the
    least value is best where `mode` says so. Without: the greatest of its evaluations, of the named ones
    those of the first metric, or else of ``reward_mean``. A summary has evaluations when its run has ended.

    Args:
        metrics: the lines of metrics.jsonl.
        evaluated: the metric of `eval`; empty without.
    """
    policy = _policy(run)
    named = {key: found.by_step.values() for key, found in summary.evaluations.items()} if summary else {}
    of_eval = summary.eval.by_step.values() if summary and summary.eval else ()
    if policy.best:
        own = {**named, evaluated: of_eval}
        values = own[policy.best] if policy.best in own else _column(metrics, policy.best)
        best = _best(values, policy.mode)
        return best, policy.best if best is not None else ""
    rewards = _column(metrics, "reward_mean")
    for name, values in (("eval", of_eval), *[*named.items()][:1], ("reward_mean", rewards)):
        if (best := _best(values)) is not None:
            return best, name
    return None, ""


def _policy(run: Path) -> CheckpointPolicy:
    """The default one where the file is damaged, or an older hflow wrote none."""
    try:
        return read_run_config(run / FILE).checkpoint
    except HflowError:
        return CheckpointPolicy()


def _column(metrics: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    values = (line.get(name) for line in metrics)
    return [value for value in values if isinstance(value, (int, float))]


def _best(values: Iterable[float], mode: str = "max") -> float | None:
    choose = max if mode == "max" else min
    return choose(filter(math.isfinite, values), default=None)
