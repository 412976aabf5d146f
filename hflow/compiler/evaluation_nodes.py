"""How the nodes of a named evaluation run: where and how those of the step do, on their own rows and
lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from hflow.compiler.memory import device_memory
from hflow.compiler.planner.assignments import maker
from hflow.compiler.planner.step import without_model
from hflow.compiler.state import Draft
from hflow.cost.compute import node_time_s
from hflow.cost.memory import working_bytes
from hflow.graph.ir import Graph, Node, step_node
from hflow.plan.engine_registry import profile_of
from hflow.plan.node_plan import NodePlan
from hflow.plan.workload import Workload, workload


def evaluation_nodes(draft: Draft, graph: Graph) -> tuple[NodePlan, ...]:
    """Their plans, in the order of `graph`; those of the step are known."""
    of_step = {plan.node: plan for plan in draft.nodes}
    spare = min(m.capacity_bytes - m.peak_bytes for m in device_memory(draft, draft.nodes))
    found: dict[str, NodePlan] = {}
    for node in graph.nodes:
        found[node.name] = _plan(draft, graph, node, of_step.get(step_node(node.name)), found, spare)
    return tuple(found.values())


def _plan(
    draft: Draft,
    graph: Graph,
    node: Node,
    step: NodePlan | None,
    found: Mapping[str, NodePlan],
    spare: int,
) -> NodePlan:
    """`step`: of the node that it stands for; what a metric is made of runs where its first value lies.
    `spare`: bytes that no device lacks at any time."""
    if step is None:
        return without_model(node, found[maker(graph, node.inputs[0])].mesh)
    if node.model is None:
        return without_model(node, step.mesh)
    return _priced(draft, node, step, max(0, spare))


def _priced(draft: Draft, node: Node, step: NodePlan, spare: int) -> NodePlan:
    """With as many rows at once as the step's node has, as far as memory goes; with one at least."""
    model, work, mesh = draft.graph.model_of(node), workload(node), step.mesh
    shape = draft.shapes[model.name]
    before = workload(draft.graph.node(step.node))
    is_served = profile_of(step.engine).server is not None
    rows = _served_rows(step, before, work) if is_served else _most_rows(step, work)

    def needed(size: int) -> int:
        return working_bytes(node.op, shape, model.dtype, work, mesh, size, step.strategy)

    while not is_served and rows > 1 and needed(rows) > step.memory_bytes + spare:
        rows = (rows + 1) // 2
    time_s = node_time_s(node.op, shape, model.dtype, work, mesh, rows, draft.cluster, step.strategy)
    size = step.memory_bytes if is_served else needed(rows)  # a server has its cache, whoever asks
    return replace(step, node=node.name, micro_batch=rows, start_s=0.0, time_s=time_s, memory_bytes=size)


def _most_rows(step: NodePlan, work: Workload) -> int:
    """Of a replica, whole prompts; no more than the step has at once."""
    prompts = ceil(work.rows // work.samples / step.mesh.dp)
    return max(1, min(step.micro_batch, prompts * work.samples))


def _served_rows(step: NodePlan, before: Workload, work: Workload) -> int:
    """As many as the server's cache, made for the sequences of the step, holds of the evaluation's."""
    return max(1, min(step.micro_batch, step.micro_batch * before.sequence // work.sequence))
