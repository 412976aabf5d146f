"""Plans in which score nodes have one forward pass with the training of their models, where a step is shorter
so.

Such a pair is on one mesh, in one layout and in the same micro-batches: one node group in the search, whose
candidates all share. So a graph is planned twice, first without such pairs; what the second search finds is
the plan if its step is shorter, and it looks at nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hflow.compiler.cheapest_engine import proven, proven_gap
from hflow.compiler.pins import Pin
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.state import Draft, NoneShorter
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.plan import Plan, Search, TriedSharing
from hflow.plan.shared_forward import refusal, sharing
from hflow.plan.verify.runnable import unrunnable

UNPROVEN = "not all plans without that were searched"


def planned_sharing(draft: Draft, planned: Callable[[Draft], Plan]) -> Plan:
    """The plan of `draft`. Where forward passes can be shared, the one with all of these shared if its step
    is shorter, or if a pin asks for it. The search tells that it was tried.

    Args:
        planned: makes a plan; with half of the budget, where there may be two.

    Raises:
        HflowError: what that of the first raises; HF302 where a pin asks for what cannot be shared.
    """
    pairs = _not_refused(draft)
    if any(pin.share_forward for pin in draft.pins):
        return planned(replace(draft, sharing=pairs))
    if draft.options.planner != "exact" or not pairs:
        return planned(draft)
    budget_s = draft.options.budget_s and draft.options.budget_s / 2
    draft = replace(draft, options=replace(draft.options, budget_s=budget_s))
    own = planned(draft)
    if own.search.searched_gap and not budget_s:  # a search that took all of its effort is enough
        return _told(own, own.search, pairs, None, UNPROVEN)
    try:
        below_s = own.step_time_s * (1 - RESOLUTION)
        shared = planned(replace(draft, sharing=pairs, below_s=below_s))
    except NoneShorter as found:
        return _told(own, _after(own, found), pairs, None, "no step is shorter so")
    except HflowError as error:
        return _told(own, own.search, pairs, None, _reason(error.diagnostics[0]))
    best = shared if len(unrunnable(shared)) <= len(unrunnable(own)) else own
    return _told(best, proven(best, (own, shared)), pairs, shared.step_time_s)


def _not_refused(draft: Draft) -> dict[str, str]:
    """The pairs of which no pin says that they shall not share."""
    unwanted = {pin.node for pin in draft.pins if pin.share_forward is False}
    pairs = sharing(draft.graph, draft.shapes)
    found = {node: trainer for node, trainer in pairs.items() if not {node, trainer} & unwanted}
    able = {*found, *found.values()}
    if alone := [pin for pin in draft.pins if pin.share_forward and pin.node not in able]:
        raise HflowError(Diagnostic("HF302", f"--pin {pin.text}: {_alone(draft, pin)}") for pin in alone)
    return found


def _alone(draft: Draft, pin: Pin) -> str:
    """Why a node that shall share its forward pass cannot."""
    graph = draft.graph
    node = graph.node(pin.node)
    scores = [n for n in graph.nodes if n.op == "score" and n.model_use.model == node.model_use.model]
    trainers = graph.trainers(node.model_use.model)
    if not scores or not trainers:
        return f"no node {'trains' if scores else 'scores with'} `{node.model_use.model}`"
    score = node if node.op == "score" else scores[0]
    reason = refusal(graph, draft.shapes[node.model_use.model], score, trainers[0])
    return reason or "another pin refuses it"


def _told(
    plan: Plan, search: Search, pairs: Mapping[str, str], step_s: float | None, reason: str = ""
) -> Plan:
    tried = TriedSharing(tuple(pairs.items()), step_s, reason)
    return replace(plan, search=replace(search, tried_sharing=tried))


def _after(own: Plan, found: NoneShorter) -> Search:
    """What is proven of a plan, when a second search has found nothing shorter."""
    search = replace(own.search, explored=own.search.explored + found.explored)
    if search.gap is None or found.bound_s >= search.bound_s:
        return search
    gap = proven_gap(found.bound_s, own.step_time_s)
    return replace(search, gap=gap, bound_s=found.bound_s, searched_gap=gap)


def _reason(problem: Diagnostic) -> str:
    """Why there is no such plan; of a node group without any layout, what is in the way of one of them."""
    if problem.code in ("HF302", "HF304") and problem.help:
        return problem.help.splitlines()[-1]
    return problem.message


def sharing_of(plan: Plan) -> dict[str, str]:
    """The pairs that share a forward pass in a plan."""
    pairs = sharing(plan.graph, plan.shapes)
    return {node: trainer for node, trainer in pairs.items() if plan.node(node).strategy.share_forward}
