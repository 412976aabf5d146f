"""How the nodes of a named evaluation run, on their own rows and lengths: where and how those of the step do,
or as they are pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from hflow.compiler.evaluation_pins import pinned
from hflow.compiler.memory import device_memory
from hflow.compiler.planner.assignments import maker
from hflow.compiler.planner.step import without_model
from hflow.compiler.state import Draft
from hflow.cost.compute import node_time_s
from hflow.cost.residency import residency
from hflow.cost.working_memory import working_bytes
from hflow.graph.ir import Graph, Node, step_node
from hflow.plan.engine_registry import profile_of
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import DeviceMemory
from hflow.plan.workload import Workload, workload

Memory = tuple[DeviceMemory, ...]


def evaluation_nodes(draft: Draft, graph: Graph) -> tuple[NodePlan, ...]:
    """Their plans, in the order of `graph`; those of the step are known.

    Raises:
        HflowError: HF302 for a pin that cannot be kept.
    """
    of_step = {plan.node: plan for plan in draft.nodes}
    memory = device_memory(draft, draft.nodes)
    found: dict[str, NodePlan] = {}
    for node in graph.nodes:
        found[node.name] = _plan(draft, graph, node, of_step.get(step_node(node.name)), found, memory)
    return tuple(found.values())


def _plan(
    draft: Draft,
    graph: Graph,
    node: Node,
    step: NodePlan | None,
    found: Mapping[str, NodePlan],
    memory: Memory,
) -> NodePlan:
    """`step`: of the node that it stands for; what a metric is made of runs where its first value lies.
    `memory`: of the step."""
    if step is None:
        return without_model(node, found[maker(graph, node.inputs[0])].mesh)
    if node.model is None:
        return without_model(node, step.mesh)
    pin = next((pin for pin in draft.pins if pin.node == node.name), None)
    if pin is None:
        return _priced(draft, node, step, step.memory_bytes + _spare(draft, memory, step), None)
    own = pinned(draft, node, step, pin)
    return _priced(draft, node, own, _room(draft, memory, step, own), pin.micro)


def _spare(draft: Draft, memory: Memory, plan: NodePlan) -> int:
    """Bytes that no device of `plan` lacks at any time of a step."""
    peaks = {device: each.peak_bytes for each in memory for device in each.devices}
    kind = draft.cluster.kind
    return max(0, min(kind(device).usable_bytes - peaks.get(device, 0) for device in plan.mesh.devices))


def _room(draft: Draft, memory: Memory, step: NodePlan, own: NodePlan) -> int:
    """Bytes for the working set of a pinned node, beside its copy of the weights."""
    model = draft.graph.model(own.model or "")
    there = step.memory_bytes if {*own.mesh.devices} <= {*step.mesh.devices} else 0
    if own.sharding == step.sharding:
        return there + _spare(draft, memory, own)
    shape = draft.shapes[model.name]
    kept = residency(model, shape, own.mesh, own.strategy, draft.cluster, "read", evaluated=True)
    return max(0, there + _spare(draft, memory, own) - kept.copy_bytes)


def _priced(draft: Draft, node: Node, plan: NodePlan, room: int, micro: int | None) -> NodePlan:
    """With as many rows at once as the step's node has, as far as `room` goes; with one at least. `micro`:
    the rows that a pin says."""
    model, work, mesh = draft.graph.model_of(node), workload(node), plan.mesh
    shape = draft.shapes[model.name]
    before = workload(draft.graph.node(plan.node))
    is_served = profile_of(plan.engine).server is not None
    rows = micro or (_served_rows(plan, before, work) if is_served else _most_rows(plan, work))

    def needed(size: int) -> int:
        return working_bytes(node.op, shape, model.weight_dtype, work, mesh, size, plan.strategy)

    while not (is_served or micro) and rows > 1 and needed(rows) > room:
        rows = (rows + 1) // 2
    time_s = node_time_s(node.op, shape, model.weight_dtype, work, mesh, rows, draft.cluster, plan.strategy)
    size = plan.memory_bytes if is_served else needed(rows)  # a server has its cache, whoever asks
    return replace(plan, node=node.name, micro_batch=rows, start_s=0.0, time_s=time_s, memory_bytes=size)


def _most_rows(plan: NodePlan, work: Workload) -> int:
    """Of a replica, whole prompts; no more than the step has at once."""
    prompts = ceil(work.rows // work.samples / plan.mesh.dp)
    return max(1, min(plan.micro_batch, prompts * work.samples))


def _served_rows(plan: NodePlan, before: Workload, work: Workload) -> int:
    """As many as the server's cache, made for the sequences of the step, holds of the evaluation's."""
    return max(1, min(plan.micro_batch, plan.cached(before.sequence) // work.sequence))
