"""Plans in which score nodes have one forward pass with the training of their models, where a step is shorter
so.

Such a pair is on one mesh, in one layout and in the same micro-batches: one node group in the search, whose
candidates all share. So a graph is planned twice, once without such pairs; the shorter step is the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hflow.compiler.cheapest_engine import proven
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.state import Draft
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Graph
from hflow.plan.plan import Plan, TriedSharing
from hflow.plan.shared_forward import sharing
from hflow.plan.verify.runnable import unrunnable

WORTH = 0.02  # of a step; less is not worth another search
FORWARD = 1 / 3  # of an update's work


def planned_sharing(draft: Draft, planned: Callable[[Draft], Plan]) -> Plan:
    """The plan of `draft`. Where forward passes can be shared that are a part of the step worth it, also the
    one with all of these shared; the one with the shorter step, which tells of the other.

    Args:
        planned: makes a plan; with half of the budget, where there may be two.

    Raises:
        HflowError: what that of the first raises.
    """
    pairs = sharing(draft.graph, draft.shapes)
    if draft.options.planner != "exact" or not pairs:
        return planned(draft)
    budget_s = draft.options.budget_s and draft.options.budget_s / 2
    draft = replace(draft, options=replace(draft.options, budget_s=budget_s))
    own = planned(draft)
    if sum(_forward_s(own, draft.graph, trainer) for trainer in pairs.values()) < WORTH * own.step_time_s:
        return own
    try:
        shared = planned(replace(draft, sharing=pairs))
    except HflowError as error:
        tried = TriedSharing(tuple(pairs.items()), None, _reason(error.diagnostics[0]))
        return replace(own, search=replace(own.search, tried_sharing=tried))
    is_shorter = shared.step_time_s < own.step_time_s * (1 - RESOLUTION)
    best = shared if is_shorter and len(unrunnable(shared)) <= len(unrunnable(own)) else own
    tried = TriedSharing(tuple(pairs.items()), shared.step_time_s)
    return replace(best, search=replace(proven(best, (own, shared)), tried_sharing=tried))


def _reason(problem: Diagnostic) -> str:
    """Why there is no such plan; of a node group without any layout, what is in the way of one of them."""
    if problem.code in ("HF302", "HF304") and problem.help:
        return problem.help.splitlines()[-1]
    return problem.message


def _forward_s(plan: Plan, graph: Graph, trainer: str) -> float:
    """About what the forward pass of the first update takes."""
    return FORWARD * plan.node(trainer).time_s / graph.node(trainer).updates


def sharing_of(plan: Plan) -> dict[str, str]:
    """The pairs that share a forward pass in a plan."""
    pairs = sharing(plan.graph, plan.shapes)
    return {node: trainer for node, trainer in pairs.items() if plan.node(node).strategy.share_forward}
