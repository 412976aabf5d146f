"""The one JSON object that ``hflow compile --json`` prints: the plan's table, for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.compiler.layout import Mesh
from hflow.compiler.plan import DeviceMemory, EdgePlan, NodePlan, Plan


def plan_json(plan: Plan, search_s: float) -> dict[str, Any]:
    """`search_s`: seconds that compiling took. Times are predicted seconds, sizes bytes."""
    return {
        "hash": plan.hash,
        "graph": plan.graph.name,
        "cluster": plan.cluster.name,
        "step_time_s": plan.step_time_s,
        "tokens_per_s": plan.tokens_per_step / plan.step_time_s if plan.step_time_s else 0.0,
        "search": {"seconds": search_s, "gap": plan.search.gap, "explored": plan.search.explored},
        "nodes": [_node(n) for n in plan.nodes],
        "edges": [_edge(e) for e in plan.step.edges],
        "memory": [_memory(m) for m in plan.memory],
    }


def _node(node: NodePlan) -> dict[str, Any]:
    return {
        "name": node.node,
        "kind": node.kind,
        "model": node.model,
        "engine": node.engine,
        "devices": list(node.mesh.devices),
        "layout": _layout(node.mesh),
        "micro_batch": node.micro_batch,
        "start_s": node.start_s,
        "time_s": node.time_s,
        "memory_bytes": node.memory_bytes,
    }


def _layout(mesh: Mesh) -> Mapping[str, int]:
    return {"pp": mesh.pp, "tp": mesh.tp, "dp": mesh.dp}


def _edge(edge: EdgePlan) -> dict[str, Any]:
    return {
        "name": edge.name,
        "source": edge.source,
        "target": edge.target,
        "kind": edge.kind,
        "collective": edge.collective,
        "size_bytes": edge.size_bytes,
        "bytes_per_device": edge.bytes_per_device,
        "lower_bound_bytes_per_device": edge.lower_bound_bytes_per_device,
        "peak_bytes": edge.peak_bytes,
        "time_s": edge.time_s,
    }


def _memory(memory: DeviceMemory) -> dict[str, Any]:
    return {
        "devices": list(memory.devices),
        "peak_bytes": memory.peak_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "parts": dict(memory.parts),
    }
