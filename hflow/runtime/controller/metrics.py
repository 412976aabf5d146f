"""Merge the workers' reports of one step into one line of ``metrics.jsonl``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from hflow.graph.ir import Graph
from hflow.runtime.controller.time_taken import time_taken
from hflow.runtime.controller.worker_failure import WorkerReport


def merge(graph: Graph, step: int, reports: Sequence[WorkerReport], wall_s: float) -> dict[str, Any]:
    """One flat object: ``step, loss.<train>, reward_mean, tokens_per_s, time_s.<node>, digest.<generate>``
    and whatever else nodes report, as ``<node>.<metric>``. Times are those of the slowest worker; where
    workers wait for each other, from when the last one began."""
    means = _means(reports)
    out: dict[str, Any] = {"step": step}
    for node in graph.nodes:
        if node.op == "train":
            out[f"loss.{node.name}"] = means.pop(f"{node.name}.loss")
    if graph.reward in means:
        out["reward_mean"] = means[graph.reward]
    tokens = sum(r["tokens"] for r in reports)
    out |= {"tokens": tokens, "tokens_per_s": tokens / wall_s, "time_s": wall_s}
    out |= means
    trains = {node.name for node in graph.nodes if node.op == "train"}
    out |= {f"time_s.{name}": seconds for name, seconds in _times(reports, trains).items()}
    out |= {f"digest.{name}": digest for name, digest in _digests(reports).items()}
    return out


def _means(reports: Sequence[WorkerReport]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for report in reports:
        for name, (total, weight) in report["metrics"].items():
            sums[name] += total
            weights[name] += weight
    return {name: sums[name] / weights[name] for name in sums if weights[name]}


def _times(reports: Sequence[WorkerReport], trains: Collection[str]) -> dict[str, float]:
    """Seconds per node (and per edge, named `source -> target` as in the plan)."""
    seconds: dict[str, float] = defaultdict(float)
    for (_, name), taken_s in time_taken(reports, trains):
        seconds[name] += taken_s
    return dict(seconds)


def _digests(reports: Sequence[WorkerReport]) -> dict[str, str]:
    totals: dict[str, int] = defaultdict(int)
    for report in reports:
        for name, digest in report["digests"].items():
            totals[name] = (totals[name] + digest) % 2**64
    return {name: f"{total:016x}" for name, total in totals.items()}
