"""The one JSON object that ``hflow compile --json`` prints: the plan's table, for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.compiler.layout import Mesh
from hflow.compiler.plan import DeviceMemory, EdgePlan, NodePlan, Plan
from hflow.compiler.workload import rounds
from hflow.graph.graph import Graph, Input, Node, Region


def plan_json(plan: Plan, search_s: float) -> dict[str, Any]:
    """`search_s`: seconds that compiling took. Times are predicted seconds, sizes bytes."""
    return {
        "hash": plan.hash,
        "graph": plan.graph.name,
        "cluster": plan.cluster.name,
        "step_time_s": plan.step_time_s,
        "tokens_per_s": plan.tokens_per_step / plan.step_time_s if plan.step_time_s else 0.0,
        "search": {"seconds": search_s, "gap": plan.search.gap, "explored": plan.search.explored},
        "regions": [_region(plan.graph, region) for region in plan.graph.regions[1:]],
        "carried": [_carried(node, value) for node, value in plan.graph.edges() if value.lag],
        "nodes": [_node(n, plan.graph.node(n.node).region) for n in plan.nodes],
        "edges": [_edge(plan.graph, e) for e in plan.step.edges],
        "memory": [_memory(m) for m in plan.memory],
    }


def _region(graph: Graph, region: Region) -> dict[str, Any]:
    """`rounds` are those that the times of its nodes are predicted for."""
    node = graph.node(region.name)
    return {
        "name": region.name,
        "until": str(region.until),
        "rows": region.rows,
        "rounds": rounds(graph, node),
        "most_rounds": region.times,
        "short": node.options["short"],
    }


def _carried(reader: Node, value: Input) -> dict[str, Any]:
    return {"source": str(value.source), "target": reader.name, "lag": value.lag, "init": value.init}


def _node(node: NodePlan, region: str) -> dict[str, Any]:
    return {
        "name": node.node,
        "region": region,
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


def _edge(graph: Graph, edge: EdgePlan) -> dict[str, Any]:
    """`lag`: how many updates old weights are; `every`: in steps, where a frozen model takes over weights."""
    use = graph.node(edge.target).model if edge.kind == "weights" else None
    refresh = graph.model(use.model).refresh if use else None
    return {
        "name": edge.name,
        "source": edge.source,
        "target": edge.target,
        "kind": edge.kind,
        "lag": use.lag if use else 0,
        "every": refresh.every if refresh else 0,
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
