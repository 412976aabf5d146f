"""The one JSON object that ``hflow compile --json`` prints: the plan's table, for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx

from hflow.cost.host_memory import alike_hosts, host_memory
from hflow.cost.prediction_interval import node_interval, step_interval
from hflow.graph.ir import Graph, Input, Node, Region
from hflow.plan.edges import Edge, WeightEdge
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import DeviceMemory, EvaluationPlan, Plan, Search
from hflow.plan.workload import rounds
from hflow.schedule.critical_path import idle
from hflow.view.measured import Metrics, compare
from hflow.view.terminal.remarks import path_names


def plan_json(plan: Plan, search_s: float) -> dict[str, Any]:
    """`search_s`: seconds that compiling took. Times are predicted seconds, sizes bytes."""
    return {
        "hash": plan.hash,
        "graph": plan.graph.name,
        "cluster": plan.cluster.name,
        "step_time_s": plan.step_time_s,
        "step_interval_s": step_interval(plan),
        "tokens_per_s": plan.tokens_per_step / plan.step_time_s if plan.step_time_s else 0.0,
        "search": _search(plan.search, search_s),
        "regions": [_region(plan.graph, region) for region in plan.graph.regions[1:]],
        "carried": [_carried(node, value) for node, value in plan.graph.edges() if value.lag],
        "nodes": [_node(plan, n) for n in plan.nodes],
        "edges": [_edge(plan.graph, e) for e in plan.step.edges],
        **({"evaluations": list(map(_evaluation, plan.evaluations))} if plan.evaluations else {}),
        "memory": [_memory(m) for m in plan.memory],
        "hosts": _hosts(plan),
        "placement": _placement(plan),
        "path": list(path_names(plan)),
        "idle": [{"devices": list(devices), "part": part} for devices, part in idle(plan.step).items()],
    }


def _evaluation(evaluation: EvaluationPlan) -> dict[str, Any]:
    nodes = [
        {
            "node": n.node,
            "devices": list(n.mesh.devices),
            "layout": _layout(n.mesh),
            "time_s": n.time_s,
            "start_s": n.start_s,
        }
        for n in evaluation.nodes
    ]
    return {"name": evaluation.name, "time_s": evaluation.time_s, "nodes": nodes}


def measured_json(plan: Plan, metrics: Sequence[Metrics]) -> list[dict[str, Any]]:
    """Predicted and measured seconds per step of every node that was measured; `off` where they differ so
    much that it matters."""
    return [
        {"name": c.name, "predicted_s": c.predicted_s, "measured_s": c.measured_s, "off": c.is_off}
        for c in compare(plan, metrics)
    ]


def _search(search: Search, seconds: float) -> dict[str, Any]:
    """`gap` and `bound_s` are null where nothing is proven; `unsearched`: nodes not all places of which were
    searched; `tried_engines`: empty where none were to be chosen by price; `tried_sharing`: null where no
    plan with shared forward passes was searched."""
    sharing = search.tried_sharing
    return {
        "seconds": seconds,
        "gap": search.gap,
        "explored": search.explored,
        "bound_s": None if search.gap is None else search.bound_s,
        "planner": search.planner,
        "unsearched": list(search.unsearched),
        "pinned": list(search.pinned),
        "tried_engines": [
            {"engines": dict(tried.engines), "step_time_s": tried.step_time_s, "reason": tried.reason}
            for tried in search.tried_engines
        ],
        "tried_sharing": sharing
        and {"pairs": dict(sharing.pairs), "step_time_s": sharing.step_time_s, "reason": sharing.reason},
    }


def _placement(plan: Plan) -> list[dict[str, Any]]:
    """Models that share devices, directly or through others, and all of these. Generation, which may borrow
    all devices of a cluster, does not count where its model is trained or scores elsewhere."""
    shares: nx.Graph[str | int] = nx.Graph()
    resident = {n.model for n in plan.nodes if n.kind != "generate"}
    for node in plan.nodes:
        model = node.model
        if model and (node.kind != "generate" or model not in resident):
            shares.add_edges_from([(model, device) for device in node.mesh.devices])
    groups: list[set[str | int]] = list(nx.connected_components(shares))
    return [
        {
            "models": [m.name for m in plan.graph.models if m.name in group],
            "devices": sorted(member for member in group if isinstance(member, int)),
        }
        for group in groups
    ]


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
        "max_age": region.max_age,
    }


def _carried(reader: Node, value: Input) -> dict[str, Any]:
    return {"source": str(value.source), "target": reader.name, "lag": value.lag, "init": value.init}


def _node(plan: Plan, node: NodePlan) -> dict[str, Any]:
    """`time_interval_s` is null where nothing is known of it, as of nodes without a model."""
    return {
        "name": node.node,
        "region": plan.graph.node(node.node).region,
        "kind": node.kind,
        "model": node.model,
        "engine": node.engine,
        "devices": list(node.mesh.devices),
        "layout": _layout(node.mesh),
        "micro_batch": node.micro_batch,
        "start_s": node.start_s,
        "time_s": node.time_s,
        "time_interval_s": node_interval(plan, node),
        "memory_bytes": node.memory_bytes,
        "zero": node.strategy.zero,
        "recompute": node.strategy.recompute,
        "ep": node.strategy.ep,
        "etp": 1 if node.strategy.whole_experts else node.mesh.tp,
        "sp": node.strategy.sp,
        "vpp": node.strategy.vpp,
        "share_forward": node.strategy.share_forward,
        "offload": node.offload,
        **({"cache_tokens": node.cache_tokens} if node.cache_tokens else {}),
    }


def _layout(mesh: Mesh) -> Mapping[str, int]:
    return {"pp": mesh.pp, "tp": mesh.tp, "dp": mesh.dp, "cp": mesh.cp}


def _edge(graph: Graph, edge: Edge) -> dict[str, Any]:
    """`lag`: how many updates old weights are; `every`: in steps, where a frozen model takes over weights;
    `changed`: the share that is sent, null where all are."""
    use = graph.node(edge.target).model if isinstance(edge, WeightEdge) else None
    refresh = graph.model(use.model).refresh if use else None
    return {
        "name": edge.name,
        "source": edge.source,
        "target": edge.target,
        "kind": edge.kind,
        "lag": use.lag if use else 0,
        "every": refresh.every if refresh else 0,
        "changed": edge.changed if isinstance(edge, WeightEdge) else None,
        "collective": edge.collective,
        "size_bytes": edge.size_bytes,
        "bytes_per_device": edge.bytes_per_device,
        "lower_bound_bytes_per_device": edge.lower_bound_bytes_per_device,
        "peak_bytes": edge.peak_bytes,
        "time_s": edge.time_s,
    }


def _hosts(plan: Plan) -> list[dict[str, Any]]:
    """What lies in the memory of hosts; `capacity_bytes` is null where nobody has said."""
    kept = host_memory(plan.graphs, plan.shapes, plan.cluster, plan.all_nodes)
    capacity = plan.cluster.host_memory_bytes
    return [
        {"hosts": list(hosts), "bytes": parts.total(), "capacity_bytes": capacity, "parts": dict(parts)}
        for hosts, parts in alike_hosts(kept)
    ]


def _memory(memory: DeviceMemory) -> dict[str, Any]:
    return {
        "devices": list(memory.devices),
        "peak_bytes": memory.peak_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "parts": dict(memory.parts),
        "node": memory.node,
    }
