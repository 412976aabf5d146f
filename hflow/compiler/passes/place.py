"""Choose for every node where and how it runs, so that a step is shortest and the memory suffices.

The planner (`compiler.planner`) decides about nodes with a model. A generation mesh made of its trainer's
devices is regrouped (`regroup`), so that training shards lie inside generation shards. Nodes without a model
run where their values lie.
"""

from __future__ import annotations

from dataclasses import replace

from hflow.compiler.explain.infeasible import infeasible
from hflow.compiler.planner.bounds.unsearched import pin_apart, unsearched
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.planner.published.baselines import baseline
from hflow.compiler.planner.published.hybridflow import hybridflow
from hflow.compiler.planner.search import SearchResult, exhaustive, search
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.step import node_plans
from hflow.compiler.state import Draft
from hflow.diagnostics import HflowError
from hflow.plan.plan import Search


def place(draft: Draft) -> Draft:
    """Raises HF305 when no plan fits into the memory."""
    space = SearchSpace(draft)
    found = _plan(space)
    if found.choice is None:
        raise HflowError(infeasible(draft))
    nodes = node_plans(draft.graph, space.groups, found.choice.assignments, found.choice.configs)
    return replace(draft, nodes=nodes, search=_told(space, found, found.choice.step_s))


def _told(space: SearchSpace, found: SearchResult, step_s: float) -> Search:
    """What is proven of the plan that was found: without a bound nothing, and where plans that are not in the
    space may be shorter only that none of the space is."""
    planner = space.draft.options.planner
    if not found.bound_s:
        return Search(found.explored, None, planner=planner)
    apart = unsearched(space, step_s * (1 - RESOLUTION))
    if not apart:
        return Search(found.explored, found.gap, found.bound_s, planner, searched_gap=found.gap)
    names = tuple(node.name for group in apart for node in group.nodes)
    return Search(
        found.explored, None, planner=planner, unsearched=names, try_pin=pin_apart(space, apart[0]),
        searched_gap=found.gap,
    )  # fmt: skip


def _plan(space: SearchSpace) -> SearchResult:
    options = space.draft.options
    if options.planner == "exact":
        return search(space, options.budget_s)
    if options.planner == "exhaustive":
        return exhaustive(space)
    return hybridflow(space) if options.planner == "hybridflow" else baseline(space)
