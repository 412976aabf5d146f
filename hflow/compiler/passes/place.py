"""Choose for every node where and how it runs, so that a step is shortest and the memory suffices.

The planner (`compiler.planner`) decides about nodes with a model. A generation mesh made of its trainer's
devices is regrouped (`regroup`), so that training shards lie inside generation shards. Nodes without a model
run where their values lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hflow.compiler.draft import Draft
from hflow.compiler.layout import Mesh
from hflow.compiler.plan import NodePlan, Search
from hflow.compiler.planner.baselines import baseline
from hflow.compiler.planner.choice import Choice
from hflow.compiler.planner.hybridflow import hybridflow
from hflow.compiler.planner.misfit import misfit
from hflow.compiler.planner.search import Found, exhaustive, search
from hflow.compiler.planner.seats import all_meshes, shardings
from hflow.compiler.planner.space import Space
from hflow.compiler.planner.step import PYTHON_CALL_S, StepModel
from hflow.compiler.planner.unit import Unit
from hflow.compiler.ports import is_replicated
from hflow.diagnostics import HflowError
from hflow.graph.graph import Node


def place(draft: Draft) -> Draft:
    """Raises HF305 when no plan fits into the memory."""
    space = Space(draft, StepModel(draft))
    found = _plan(space)
    if found.choice is None:
        raise HflowError(misfit(draft))
    nodes = node_plans(space, found.choice)
    gap = found.gap if found.bound_s else None  # without a bound nothing is proven
    chosen = Search(found.explored, gap, found.bound_s, draft.options.planner)
    return replace(draft, nodes=nodes, search=chosen)


def _plan(space: Space) -> Found:
    options = space.draft.options
    if options.planner == "exact":
        return search(space, options.budget_s)
    if options.planner == "exhaustive":
        return exhaustive(space)
    return hybridflow(space) if options.planner == "hybridflow" else baseline(space)


def node_plans(space: Space, choice: Choice) -> tuple[NodePlan, ...]:
    """The plans of all nodes, in graph order."""
    units = space.units
    lie = shardings(units, choice.seats)
    unit_of = {node.name: unit for unit in units for node in unit.nodes}
    meshes = all_meshes(space.draft.graph, {name: lie[unit.name].mesh for name, unit in unit_of.items()})
    return tuple(_node_plan(node, meshes, unit_of.get(node.name), choice) for node in space.draft.graph.nodes)


def _node_plan(node: Node, meshes: Mapping[str, Mesh], unit: Unit | None, choice: Choice) -> NodePlan:
    mesh = meshes[node.name]
    if unit is None:
        share = node.rows if is_replicated(node) else max(1, node.rows // mesh.dp)
        return NodePlan(node.name, node.op, None, "python", mesh, share, 0.0, PYTHON_CALL_S, 0)
    way, option = choice.ways[node.name], choice.seats[unit.name].option
    strategy = replace(option.strategy, recompute=way.recompute)
    return NodePlan(
        node.name, node.op, unit.model, strategy.engine, mesh, way.micro_batch,
        0.0, way.time_s, way.need_bytes - option.swapped_bytes, strategy, option.offload,
    )  # fmt: skip
