"""Choose a candidate for every node so that the step is shortest and the memory suffices.

All models are colocated: nodes share the cluster in time, so a step lasts the sum of its nodes and of
what moves between them. Every combination of the kept candidates is priced, weight resharding
included. A generation mesh made of its trainer's devices is regrouped (`regroup`), so that training
shards lie inside generation shards. Nodes without a model run where their values lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import prod

from hflow.compiler.draft import Candidate, Draft
from hflow.compiler.layout import Mesh
from hflow.compiler.lowering import lower_rows, lower_weights
from hflow.compiler.passes.candidates import planned_together
from hflow.compiler.passes.check_memory import device_memory
from hflow.compiler.plan import NodePlan, Search
from hflow.compiler.ports import input_layout, is_replicated, output_layout
from hflow.compiler.regroup import generation_mesh
from hflow.compiler.workload import rounds
from hflow.graph.graph import Graph, Input, Node

COMBINATIONS = 3_000
PYTHON_CALL_S = 1e-3  # a data or call node; measured times replace it in the run's table

Choice = Mapping[str, Candidate]


def place(draft: Draft) -> Draft:
    options = [_alternatives(draft, nodes) for nodes in planned_together(draft.graph)]
    kept = _kept(options)
    best: tuple[tuple[bool, float], tuple[NodePlan, ...]] | None = None
    explored = 0
    for combination in product(*kept):
        explored += 1
        choice = {name: c for part in combination for name, c in part.items()}
        if best and (False, _models_s(draft, choice)) >= best[0]:
            continue  # its nodes alone take longer than the best step
        nodes = _assign(draft, choice)
        fits = all(m.peak_bytes <= m.capacity_bytes for m in device_memory(draft, nodes))
        key = (not fits, _step_s(draft, nodes))
        if best is None or key < best[0]:
            best = key, nodes
    assert best
    gap = 0.0 if list(map(len, kept)) == list(map(len, options)) else None
    return replace(draft, nodes=best[1], search=Search(explored, gap))


def _alternatives(draft: Draft, nodes: tuple[Node, ...]) -> list[Choice]:
    """What may be chosen for nodes that are planned together."""
    names = [n.name for n in nodes]
    return [dict(zip(names, together)) for together in zip(*(draft.candidates[name] for name in names))]


def _kept(options: list[list[Choice]]) -> list[list[Choice]]:
    """The alternatives, cut evenly from the slow end until all combinations can be tried."""
    kept = list(options)
    while prod(map(len, kept)) > COMBINATIONS:
        longest = max(range(len(kept)), key=lambda i: len(kept[i]))
        kept[longest] = kept[longest][:-1]
    return kept


def _assign(draft: Draft, choice: Choice) -> tuple[NodePlan, ...]:
    """Node plans in graph order, generation meshes regrouped."""
    meshes: dict[str, Mesh] = {name: _mesh(c) for name, c in choice.items()}
    for edge in draft.weight_edges:
        if draft.graph.node(edge.reader).op == "generate":
            meshes[edge.reader] = _regrouped(meshes[edge.trainer], meshes[edge.reader])
    for node in (n for n in draft.graph.nodes if not n.model):
        meshes[node.name] = _mesh_of_values(draft.graph, node, meshes)
    return tuple(_node_plan(node, meshes[node.name], choice.get(node.name)) for node in draft.graph.nodes)


def _mesh(c: Candidate) -> Mesh:
    return Mesh.of(c.devices, pp=c.pp, dp=c.dp, tp=c.tp)


def _regrouped(train: Mesh, generate: Mesh) -> Mesh:
    same_devices = set(train.devices) == set(generate.devices)
    regrouped = generation_mesh(train, generate.tp) if same_devices else None
    return regrouped or generate


def _mesh_of_values(graph: Graph, node: Node, meshes: Mapping[str, Mesh]) -> Mesh:
    """Where a node without a model runs: a region's own node on all devices of the region, a call where
    its first input is made, a data node where its first output is read."""
    if node.op == "repeat":
        devices = sorted({d for inner in graph.inside(node.name) for d in meshes[inner.name].devices})
        return Mesh.of(tuple(devices), dp=len(devices))
    makers = [_maker(graph, value) for value in node.inputs if not value.lag]
    return meshes[makers[0]] if makers else _first_consumer(graph, node, meshes)


def _maker(graph: Graph, value: Input) -> str:
    """The node that made a value; for one that left a region, the node inside."""
    producer = graph.node(value.source.node)
    inner = producer.input(value.source.port) if producer.op == "repeat" else None
    return inner.source.node if inner else producer.name


def _first_consumer(graph: Graph, node: Node, meshes: Mapping[str, Mesh]) -> Mesh:
    """The mesh of the first placed node that reads from `node`, directly or through calls."""
    for consumer, value in graph.edges():
        if value.source.node == node.name and not value.lag:
            return meshes.get(consumer.name) or _first_consumer(graph, consumer, meshes)
    return next(iter(meshes.values()))


def _node_plan(node: Node, mesh: Mesh, candidate: Candidate | None) -> NodePlan:
    if candidate is None:
        share = node.rows if is_replicated(node) else max(1, node.rows // mesh.dp)
        return NodePlan(node.name, node.op, None, "python", mesh, share, 0.0, PYTHON_CALL_S, 0)
    assert node.model
    return NodePlan(
        node.name, node.op, node.model.model, "megatron", mesh, candidate.micro_batch,
        0.0, candidate.time_s, candidate.working_bytes,
    )  # fmt: skip


def _models_s(draft: Draft, choice: Choice) -> float:
    """A lower bound of the step's time: what nodes with a model take."""
    return sum(c.time_s * rounds(draft.graph, draft.graph.node(name)) for name, c in choice.items())


def _step_s(draft: Draft, nodes: tuple[NodePlan, ...]) -> float:
    """Sum of nodes, weight edges and data edges: colocated nodes run one after the other."""
    graph, plans = draft.graph, {n.node: n for n in nodes}
    total = sum(n.time_s * rounds(graph, graph.node(n.node)) for n in nodes)
    for edge in draft.weight_edges:
        shape, dtype = draft.shapes[edge.model], graph.model(edge.model).dtype
        meshes = plans[edge.trainer].sharding, plans[edge.reader].sharding
        total += lower_weights(shape, dtype, *meshes, draft.cluster).time_s / max(1, edge.every)
    for consumer, value in graph.edges():
        producer = graph.node(value.source.node)
        source = output_layout(producer, plans[producer.name].mesh, value.type)
        target = input_layout(consumer, plans[consumer.name].mesh, value.type)
        if source != target:
            time_s = lower_rows((value.type,), source, target, draft.cluster).time_s
            total += time_s * rounds(graph, consumer)
    return total
