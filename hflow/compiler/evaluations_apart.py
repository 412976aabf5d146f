"""Named evaluations with few rows, in layouts of their own where that makes the step shorter.

Nodes of an evaluation run as those of the step unless they are pinned, and each replica needs a row. So an
evaluation of 30 rows would keep a rollout of thousands from more than 30 replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from hflow.compiler.pins import parse_pins
from hflow.compiler.plan_pins import placed_at
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.state import Draft
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph, NamedEvaluation, Node, step_node
from hflow.plan.engine_registry import DEFAULT_ENGINE, EngineName, profile_of
from hflow.plan.plan import Plan
from hflow.plan.verify.runnable import unrunnable


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
    try:
        pins = parse_pins(_pins(together, small), draft.graph, draft.cluster)
        apart = planned(replace(draft, pins=(*draft.pins, *pins)))
    except HflowError:
        return together
    is_shorter = apart.step_time_s < together.step_time_s * (1 - RESOLUTION)
    best = apart if is_shorter and len(unrunnable(apart)) <= len(unrunnable(together)) else together
    explored = together.search.explored + apart.search.explored
    return replace(best, search=replace(best.search, explored=explored))


def _is_small(named: NamedEvaluation, draft: Draft) -> bool:
    """Whether its rows may bound layouts of the step, and it can be elsewhere; a user who has pinned it has
    decided."""
    pinned = {pin.node for pin in draft.pins}
    if named.rows >= draft.cluster.num_devices or any(own.name in pinned for own in named.nodes):
        return False
    return any(_may_be_apart(own, draft.graph, draft.engines) for own in named.nodes)


def _may_be_apart(own: Node, graph: Graph, engines: Mapping[str, EngineName]) -> bool:
    """Whether weights move to the node: its model is trained, and no server answers it."""
    engine = engines.get(step_node(own.name), DEFAULT_ENGINE)
    return bool(own.model and graph.trainers(own.model.model)) and profile_of(engine).server is None


def _pins(plan: Plan, evaluations: set[str]) -> Iterator[str]:
    engines: Mapping[str, EngineName] = {node.node: node.engine for node in plan.nodes}
    named = (named for named in plan.graph.evaluations if named.name in evaluations)
    apart = {own.name for each in named for own in each.nodes if _may_be_apart(own, plan.graph, engines)}
    yield from (placed_at(node) for own in plan.evaluations for node in own.nodes if node.node in apart)
