"""The interval in which a time probably lies, around what is predicted.

`RATIOS` are quantiles of measured by predicted times, of cases to which nothing was fitted: figures that
others have published of GPUs, and runs of hflow on the two workers of one machine without GPUs. Nine in ten
of them lie inside. `benchmarks/intervals.py` makes them; ``docs/predictions.md`` says of how many cases, and
how many each interval holds that it was not made of. Of scores on GPUs nothing is published: they are taken
to be as far off as training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from hflow.plan.engine_profile import Platform
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan

TimedKind = Literal["train", "score", "generate", "step", "step with experts"]


class Interval(NamedTuple):
    """Seconds; of `RATIOS` multiples of what is predicted."""

    low: float
    high: float


RATIOS: Mapping[Platform, Mapping[TimedKind, Interval]] = {
    "cuda": {
        "train": Interval(0.87, 1.23),
        "score": Interval(0.87, 1.23),
        "generate": Interval(0.83, 1.49),
        "step": Interval(0.91, 1.49),
        "step with experts": Interval(0.91, 1.74),
    },
    "cpu": {
        "train": Interval(0.76, 1.41),
        "score": Interval(0.9, 1.63),
        "generate": Interval(0.8, 1.46),
        "step": Interval(0.82, 1.4),
    },
}
_NODES: Mapping[str, TimedKind] = {"train": "train", "score": "score", "generate": "generate"}


def step_interval(plan: Plan) -> Interval:
    """Of the plan's step. A step that generates nothing is timed as training is."""
    ratios = RATIOS[plan.cluster.device.platform]
    if not any(node.kind == "generate" for node in plan.nodes):
        return _around(plan.step_time_s, ratios["train"])
    experts = any(shape.moe for shape in plan.shapes.values())
    timed = "step with experts" if experts and "step with experts" in ratios else "step"
    return _around(plan.step_time_s, ratios[timed])


def node_interval(plan: Plan, node: NodePlan) -> Interval | None:
    """Of one execution of a node with a model; None for others, of which nothing is known."""
    timed = _NODES.get(node.kind)
    return _around(node.time_s, RATIOS[plan.cluster.device.platform][timed]) if timed else None


def _around(seconds: float, ratios: Interval) -> Interval:
    return Interval(seconds * ratios.low, seconds * ratios.high)
