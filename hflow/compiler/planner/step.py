"""What an assignment of all node groups means: the plans of all nodes, and the tasks of their step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hflow.compiler.candidates.node_groups import ExecConfig, NodeGroup
from hflow.compiler.planner.assignments import Assignments, all_meshes, shardings
from hflow.compiler.program_builder.builder import ProgramBuilder
from hflow.cost.paged_cache import cache_tokens
from hflow.graph.ir import Graph, Node
from hflow.plan.engine_registry import MODELLESS_ENGINE, profile_of
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.ports import is_replicated
from hflow.plan.program import Program
from hflow.schedule.arrange import step_tasks
from hflow.schedule.task_times import Task

PYTHON_CALL_S = 1e-3  # a data or call node; measured times replace it in the run's table
Configs = Mapping[str, ExecConfig]  # of nodes with models


def tasks_of_step(
    builder: ProgramBuilder, groups: tuple[NodeGroup, ...], assignments: Assignments, configs: Configs
) -> list[Task]:
    """Those of the program that would be compiled."""
    instructions, _ = builder.build(node_plans(builder.graph, groups, assignments, configs))
    return step_tasks(Program(builder.graph, (), tuple(instructions)))


def node_plans(
    graph: Graph, groups: tuple[NodeGroup, ...], assignments: Assignments, configs: Configs
) -> tuple[NodePlan, ...]:
    """The plans of all nodes, in graph order."""
    lie = shardings(groups, assignments)
    group_of = {node.name: group for group in groups for node in group.nodes}
    meshes = all_meshes(graph, {name: lie[group.name].mesh for name, group in group_of.items()})
    return tuple(
        _with_model(node, meshes[node.name], group, assignments, configs[node.name])
        if (group := group_of.get(node.name))
        else without_model(node, meshes[node.name])
        for node in graph.nodes
    )


def _with_model(
    node: Node, mesh: Mesh, group: NodeGroup, assignments: Assignments, config: ExecConfig
) -> NodePlan:
    candidate = assignments[group.name].candidate
    strategy = replace(candidate.strategy, recompute=config.recompute)
    return NodePlan(
        node.name, node.op, group.model, strategy.engine, mesh, config.micro_batch,
        0.0, config.time_s, config.need_bytes - candidate.kept.swapped_bytes, strategy, candidate.offload,
        _paged_tokens(node, mesh, group, config.micro_batch),
    )  # fmt: skip


def _paged_tokens(node: Node, mesh: Mesh, group: NodeGroup, rows: int) -> int:
    """Of a KV cache; 0 where it has room for the greatest length of all rows in flight."""
    work = group.works[group.nodes.index(node)]
    paged = node.op == "generate" and work.varies and profile_of(group.engine).pages
    return cache_tokens(work, mesh.dp, rows, group.engine) if paged else 0


def without_model(node: Node, mesh: Mesh) -> NodePlan:
    """Of a data or call node."""
    share = node.rows if is_replicated(node) else max(1, node.rows // mesh.dp)
    return NodePlan(node.name, node.op, None, MODELLESS_ENGINE, mesh, share, 0.0, PYTHON_CALL_S, 0)
