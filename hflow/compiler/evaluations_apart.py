"""Named evaluations with few rows, in layouts of their own where that makes the step shorter.

Nodes of an evaluation run as those of the step unless they are pinned, and each replica needs a row. So an
evaluation of 30 rows would keep a rollout of thousands from more than 30 replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hflow.compiler.pins import parse_pins
from hflow.compiler.plan_pins import placed_at
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.state import Draft
from hflow.diagnostics import HflowError
from hflow.graph.ir import NamedEvaluation
from hflow.plan.engine_registry import profile_of
from hflow.plan.plan import Plan


def planned_apart(draft: Draft, planned: Callable[[Draft], Plan]) -> Plan:
    """The plan of `draft`. Where evaluations have fewer rows than there are devices, also the one with these
    evaluations pinned to where the first has them; the one with the shorter step.

    Args:
        planned: makes a plan; with half of the budget, where there are two.

    Raises:
        HflowError: what that of the first raises.
    """
    small = {named.name for named in draft.graph.evaluations if _is_small(named, draft)}
    if not small:
        return planned(draft)
    budget_s = draft.options.budget_s and draft.options.budget_s / 2
    draft = replace(draft, options=replace(draft.options, budget_s=budget_s))
    together = planned(draft)
    pins = parse_pins(_pins(together, small), draft.graph, draft.cluster)
    if not pins:
        return together
    try:
        apart = planned(replace(draft, pins=(*draft.pins, *pins)))
    except HflowError:
        return together
    return apart if apart.step_time_s < together.step_time_s * (1 - RESOLUTION) else together


def _is_small(named: NamedEvaluation, draft: Draft) -> bool:
    """Whether its rows may bound layouts of the step; a user who has pinned it has decided."""
    pinned = {pin.node for pin in draft.pins}
    return named.rows < draft.cluster.num_devices and not any(own.name in pinned for own in named.nodes)


def _pins(plan: Plan, evaluations: set[str]) -> Iterator[str]:
    """Of nodes with a model. Those that servers answer stay with these."""
    named = (named for named in plan.graph.evaluations if named.name in evaluations)
    placed = {own.name for each in named for own in each.nodes if own.model}
    for node in (node for own in plan.evaluations for node in own.nodes if node.node in placed):
        if profile_of(node.engine).server is None:
            yield placed_at(node)
