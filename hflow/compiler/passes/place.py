"""Choose for every node where and how it runs, so that a step is shortest and the memory suffices.

The planner (`compiler.planner`) decides about nodes with a model. A generation mesh made of its trainer's
devices is regrouped (`regroup`), so that training shards lie inside generation shards. Nodes without a model
run where their values lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.explain.infeasible import infeasible
from hflow.compiler.planner.assignments import all_meshes, shardings
from hflow.compiler.planner.bounds.unsearched import pin_apart, unsearched
from hflow.compiler.planner.full_assignment import FullAssignment
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.planner.published.baselines import baseline
from hflow.compiler.planner.published.hybridflow import hybridflow
from hflow.compiler.planner.search import SearchResult, exhaustive, search
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.step import PYTHON_CALL_S, StepModel
from hflow.compiler.state import Draft
from hflow.diagnostics import HflowError
from hflow.graph.ir import Node
from hflow.plan.engine_registry import MODELLESS_ENGINE
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Search
from hflow.plan.ports import is_replicated


def place(draft: Draft) -> Draft:
    """Raises HF305 when no plan fits into the memory."""
    space = SearchSpace(draft, StepModel(draft))
    found = _plan(space)
    if found.choice is None:
        raise HflowError(infeasible(draft))
    nodes = node_plans(space, found.choice)
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


def node_plans(space: SearchSpace, choice: FullAssignment) -> tuple[NodePlan, ...]:
    """The plans of all nodes, in graph order."""
    groups = space.groups
    lie = shardings(groups, choice.assignments)
    group_of = {node.name: group for group in groups for node in group.nodes}
    meshes = all_meshes(space.draft.graph, {name: lie[group.name].mesh for name, group in group_of.items()})
    return tuple(
        _node_plan(node, meshes, group_of.get(node.name), choice) for node in space.draft.graph.nodes
    )


def _node_plan(
    node: Node, meshes: Mapping[str, Mesh], group: NodeGroup | None, choice: FullAssignment
) -> NodePlan:
    mesh = meshes[node.name]
    if group is None:
        share = node.rows if is_replicated(node) else max(1, node.rows // mesh.dp)
        return NodePlan(node.name, node.op, None, MODELLESS_ENGINE, mesh, share, 0.0, PYTHON_CALL_S, 0)
    config, candidate = choice.configs[node.name], choice.assignments[group.name].candidate
    strategy = replace(candidate.strategy, recompute=config.recompute)
    return NodePlan(
        node.name, node.op, group.model, strategy.engine, mesh, config.micro_batch,
        0.0, config.time_s, config.need_bytes - candidate.swapped_bytes, strategy, candidate.offload,
    )  # fmt: skip
