"""Merge the workers' reports of one step into one line of ``metrics.jsonl``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hflow.graph.ir import Graph
from hflow.runtime.controller.worker_failure import WorkerReport


def merge(graph: Graph, step: int, reports: Sequence[WorkerReport], wall_s: float) -> dict[str, Any]:
    """One flat object: ``step, loss.<train>, reward_mean, tokens_per_s, time_s.<node>, digest.<generate>``
    and whatever else nodes report, as ``<node>.<metric>``. Times are those of the slowest worker."""
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
    out |= {f"time_s.{name}": seconds for name, seconds in _times(reports).items()}
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


def _times(reports: Sequence[WorkerReport]) -> dict[str, float]:
    """Per node (and per edge, named `source -> target` as in the plan): the slowest worker's seconds."""
    slowest: dict[str, float] = defaultdict(float)
    for report in reports:
        own: dict[str, float] = defaultdict(float)
        for event in report["events"]:
            own[event["name"]] += event["end_s"] - event["start_s"]
        for name, seconds in own.items():
            slowest[name] = max(slowest[name], seconds)
    return dict(slowest)


def _digests(reports: Sequence[WorkerReport]) -> dict[str, str]:
    totals: dict[str, int] = defaultdict(int)
    for report in reports:
        for name, digest in report["digests"].items():
            totals[name] = (totals[name] + digest) % 2**64
    return {name: f"{total:016x}" for name, total in totals.items()}
