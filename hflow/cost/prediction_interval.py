"""The interval in which a time probably lies, around what is predicted.

`RATIOS` are quantiles of measured by predicted times, of cases to which nothing was fitted: figures that
others have published of GPUs, and runs of hflow on two workers of a calibrated machine without GPUs. 17 in 20
of them lie inside, of fewer than fourteen all. `benchmarks/intervals.py` makes them; the page
``docs/predictions.md`` says of how many cases, and how many each interval holds that it was not made of. Of
scores on GPUs little is published: their interval is made of training, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from hflow.cost.comm import crosses_hosts
from hflow.plan.engine_profile import Platform
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan

TimedKind = Literal["train", "score", "generate", "step", "step with experts", "step over hosts"]


class Interval(NamedTuple):
    """Seconds; of `RATIOS` multiples of what is predicted."""

    low: float
    high: float


RATIOS: Mapping[Platform, Mapping[TimedKind, Interval]] = {
    "cuda": {
        "train": Interval(0.87, 1.17),
        "score": Interval(0.87, 1.22),
        "generate": Interval(0.85, 1.46),
        "step": Interval(0.91, 1.49),
        "step with experts": Interval(0.84, 1.57),
        "step over hosts": Interval(0.72, 1.62),
    },
    "cpu": {
        "train": Interval(0.8, 1.07),
        "score": Interval(0.81, 1.14),
        "generate": Interval(0.81, 1.12),
        "step": Interval(0.83, 1.11),
    },
}
_NODES: Mapping[str, TimedKind] = {"train": "train", "score": "score", "generate": "generate"}


def step_interval(plan: Plan) -> Interval | None:
    """Of the plan's step; None where nothing is known of steps like it, or it takes no time.

    Steps that generate with tp over several hosts are published of two models with experts, which count for
    all. A step that generates nothing is timed as its training is, or its scores; without generation, nothing
    is known of models with experts.
    """
    return _around(plan, plan.step_time_s, _kind_of_step(plan))


def _kind_of_step(plan: Plan) -> TimedKind | None:
    kinds = {node.kind for node in plan.nodes}
    experts = any(shape.moe for shape in plan.shapes.values())
    if _generates_over_hosts(plan):
        return "step over hosts"
    if "generate" in kinds:
        return "step with experts" if experts else "step"
    return None if experts else next((kind for name, kind in _NODES.items() if name in kinds), None)


def _generates_over_hosts(plan: Plan) -> bool:
    """Whether tp of any generation reaches over hosts."""
    generating = (node.mesh for node in plan.nodes if node.kind == "generate")
    return any(crosses_hosts(plan.cluster, mesh, "tp") for mesh in generating)


def node_interval(plan: Plan, node: NodePlan) -> Interval | None:
    """Of what a node takes in a step; None of those without a model, or with experts."""
    experts = bool(node.model and plan.shapes[node.model].moe)
    return None if experts else _around(plan, node.time_s, _NODES.get(node.kind))


def _around(plan: Plan, seconds: float, timed: TimedKind | None) -> Interval | None:
    device = plan.cluster.device
    measured = device.platform == "cuda" or device.calibration.weights_efficiency is not None
    if not (seconds and timed and measured):  # of CPUs, a cluster file that nobody measured says little
        return None
    ratios = RATIOS[device.platform].get(timed)
    return Interval(seconds * ratios.low, seconds * ratios.high) if ratios else None
