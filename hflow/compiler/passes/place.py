"""Choose for every node where and how it runs, so that a step is shortest and the memory suffices.

The planner (`compiler.planner`) decides about nodes with a model. A generation mesh made of its trainer's
devices is regrouped (`regroup`), so that training shards lie inside generation shards. Nodes without a model
run where their values lie.
"""

from __future__ import annotations

from dataclasses import replace

from hflow.compiler.explain.infeasible import infeasible
from hflow.compiler.planner.bounds.unsearched import pin_apart
from hflow.compiler.planner.effort import EFFORT
from hflow.compiler.planner.published.baselines import baseline
from hflow.compiler.planner.published.hybridflow import hybridflow
from hflow.compiler.planner.search import SearchResult, exhaustive
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.step import node_plans
from hflow.compiler.planner.widening import search_wider, widening
from hflow.compiler.state import Draft, NoneShorter
from hflow.diagnostics import HflowError
from hflow.plan.plan import Search

MORE_S = 60  # what a search that ended too soon is told to take, at least
LESS = EFFORT // 2  # of a search that knows how long a step may be


def place(draft: Draft) -> Draft:
    """Raises HF305 when no plan fits into the memory, `NoneShorter` where only shorter ones are of use."""
    space = SearchSpace(draft)
    found = _plan(space)
    if found.choice is None and draft.below_s < float("inf"):
        raise NoneShorter(draft.graph.name, found.bound_s, found.explored)
    if found.choice is None:
        raise HflowError(infeasible(draft, _tries_more(space, found)))
    nodes = node_plans(draft.graph, space.groups, found.choice.assignments, found.choice.configs)
    return replace(draft, nodes=nodes, search=replace(_told(space, found), pinned=_pinned(draft)))


def _tries_more(space: SearchSpace, found: SearchResult) -> str:
    """Where nothing was found, what would try more of what was asked for; empty where nothing of it fits."""
    options = space.draft.options
    if found.bound_s < float("inf"):
        return f"--budget {max(MORE_S, 2 * (options.budget_s or 0)):g} goes on for as many seconds"
    if found.unsearched and options.placement == "auto":
        return f"--pin {pin_apart(space, found.unsearched[0])} tries some of them"
    return ""


def _pinned(draft: Draft) -> tuple[str, ...]:
    """Nodes of the step with a pin of their own, not that of another node on the same base."""
    names = {node.name for node in draft.graph.nodes}
    return tuple(p.node for p in draft.pins if p.node in names and p.text.partition("=")[0].strip() == p.node)


def _told(space: SearchSpace, found: SearchResult) -> Search:
    """What is proven of the plan that was found: without a bound nothing, and where some that were not
    searched may be shorter only that none of the others is."""
    planner = space.draft.options.planner
    if not found.bound_s:
        return Search(found.explored, None, planner=planner)
    if not found.unsearched:
        return Search(found.explored, found.gap, found.bound_s, planner, searched_gap=found.gap)
    names = tuple(node.name for group in found.unsearched for node in group.nodes)
    pin = pin_apart(space, found.unsearched[0])
    return Search(
        found.explored, None, planner=planner, unsearched=names, try_pin=pin, searched_gap=found.gap
    )


def _plan(space: SearchSpace) -> SearchResult:
    options = space.draft.options
    if options.planner == "exact":
        return search_wider(space, options.budget_s, LESS if space.draft.sharing else EFFORT)
    if options.planner == "exhaustive":
        return widening(space, exhaustive)
    return hybridflow(space) if options.planner == "hybridflow" else baseline(space)
