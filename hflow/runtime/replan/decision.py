"""Whether a run goes on under another plan: arithmetic on what was planned, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hflow.graph.ir import Graph
from hflow.graph.lengths import Lengths
from hflow.graph.lengths_of_run import GREATEST
from hflow.plan.plan import Plan

COMPARED = ("p50", "p95")  # of what two distributions of lengths both state, beside the mean
ONE_TOKEN = 1.0  # lengths that differ by no more have not moved


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, and of each of its nodes."""

    step_s: float
    nodes: Mapping[str, float]

    @staticmethod
    def predicted(plan: Plan) -> StepTimes:
        return StepTimes(plan.step_time_s, {node.node: node.time_s for node in plan.nodes})


def planned_lengths_of(graph: Graph) -> dict[str, Lengths]:
    """What a graph is planned for, by node: what it states, else the greatest length for all texts."""
    greatest = {node.name: node.options[GREATEST[node.op]] for node in graph.nodes if node.op in GREATEST}
    return {name: graph.node(name).lengths or Lengths(float(most), most) for name, most in greatest.items()}


def moved_share(planned: Mapping[str, Lengths], seen: Mapping[str, Lengths]) -> float:
    """By which part of what was planned for the mean, the median or the 95th percentile of some node's
    lengths has moved at most; those that are not stated in both are not compared."""
    shares = (_moved(planned[name], seen[name]) for name in planned if name in seen)
    return max(shares, default=0.0)


def _moved(planned: Lengths, seen: Lengths) -> float:
    before, now = _figures(planned), _figures(seen)
    pairs = [(before[key], now[key]) for key in before if key in now]
    apart = [(abs(new - old), old) for old, new in pairs if abs(new - old) > ONE_TOKEN]
    return max((gap / max(old, ONE_TOKEN) for gap, old in apart), default=0.0)


def _figures(lengths: Lengths) -> dict[str, float]:
    return {"mean": lengths.mean} | {key: tokens for key, tokens in lengths.quantiles if key in COMPARED}


def expected_step_s(old: StepTimes, new: StepTimes, measured: StepTimes) -> float:
    """Seconds of a step under a new plan: those measured under the old one, times by how much the cost model
    says that the new one is faster. The model is corrected, node by node, by how far it was off: what a node
    took under the old plan over what was predicted for it.

    Args:
        old, new: predicted for the lengths that were seen.
        measured: under the old plan.
    """
    known = [name for name, s in old.nodes.items() if s > 0 and measured.nodes.get(name, 0) > 0]
    ratio = new.step_s / old.step_s
    if not known or not sum(new.nodes.values()):
        return measured.step_s * ratio
    usual = sum(measured.nodes[name] for name in known) / sum(old.nodes[name] for name in known)
    off = {name: measured.nodes[name] / old.nodes[name] for name in known}
    corrected = sum(s * off.get(name, usual) for name, s in new.nodes.items()) / sum(new.nodes.values())
    return measured.step_s * ratio * corrected / usual


def pays(old_s: float, new_s: float, steps_left: int, cost_s: float, gain: float) -> bool:
    """Whether the steps that are left save more than `gain` times what switching costs."""
    return new_s < old_s and (old_s - new_s) * steps_left > gain * cost_s


def warm_up_s(steps_s: Sequence[float]) -> float:
    """How much longer the first step under a plan took than those after it; 0 before there are any."""
    first, *others = steps_s or (0.0,)
    return max(0.0, first - median(others)) if others else 0.0
