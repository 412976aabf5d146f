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
from hflow.compiler.passes.check_memory import device_memory
from hflow.compiler.plan import NodePlan, Search
from hflow.compiler.ports import input_layout, output_layout
from hflow.compiler.regroup import generation_mesh
from hflow.graph.graph import Graph, Node

COMBINATIONS = 3_000
PYTHON_CALL_S = 1e-3  # a data or call node; measured times replace it in the run's table

Choice = Mapping[str, Candidate]


def place(draft: Draft) -> Draft:
    names = list(draft.candidates)
    kept = _kept(draft, names)
    complete = all(len(k) == len(draft.candidates[name]) for k, name in zip(kept, names))
    best: tuple[tuple[bool, float], tuple[NodePlan, ...]] | None = None
    explored = 0
    for combination in product(*kept):
        explored += 1
        nodes = _assign(draft, dict(zip(names, combination)))
        fits = all(m.peak_bytes <= m.capacity_bytes for m in device_memory(draft, nodes))
        key = (not fits, _step_s(draft, nodes))
        if best is None or key < best[0]:
            best = key, nodes
    assert best
    return replace(draft, nodes=best[1], search=Search(explored, 0.0 if complete else None))


def _kept(draft: Draft, names: list[str]) -> list[tuple[Candidate, ...]]:
    """The candidates of each node, cut evenly from the slow end until all combinations can be tried."""
    options = [draft.candidates[name] for name in names]
    while prod(map(len, options)) > COMBINATIONS:
        longest = max(range(len(options)), key=lambda i: len(options[i]))
        options[longest] = options[longest][:-1]
    return options


def _assign(draft: Draft, choice: Choice) -> tuple[NodePlan, ...]:
    """Node plans in graph order, generation meshes regrouped."""
    meshes: dict[str, Mesh] = {name: _mesh(c) for name, c in choice.items()}
    for edge in draft.weight_edges:
        if draft.graph.node(edge.reader).op == "generate":
            meshes[edge.reader] = _regrouped(meshes[edge.trainer], meshes[edge.reader])
    for node in draft.graph.nodes:
        if node.op == "call":
            meshes[node.name] = meshes.get(node.inputs[0].source.node) or _first_consumer(
                draft.graph, node, meshes
            )
        elif node.op == "data":
            meshes[node.name] = _first_consumer(draft.graph, node, meshes)
    return tuple(_node_plan(node, meshes[node.name], choice.get(node.name)) for node in draft.graph.nodes)


def _mesh(c: Candidate) -> Mesh:
    return Mesh.of(c.devices, pp=c.pp, dp=c.dp, tp=c.tp)


def _regrouped(train: Mesh, generate: Mesh) -> Mesh:
    same_devices = set(train.devices) == set(generate.devices)
    regrouped = generation_mesh(train, generate.tp) if same_devices else None
    return regrouped or generate


def _first_consumer(graph: Graph, node: Node, meshes: Mapping[str, Mesh]) -> Mesh:
    """The mesh of the first placed node that reads from `node`, directly or through calls."""
    for consumer, value in graph.edges():
        if value.source.node == node.name:
            return meshes.get(consumer.name) or _first_consumer(graph, consumer, meshes)
    return next(iter(meshes.values()))


def _node_plan(node: Node, mesh: Mesh, candidate: Candidate | None) -> NodePlan:
    if candidate is None:
        rows = node.rows
        return NodePlan(node.name, node.op, None, "python", mesh, rows // mesh.dp, 0.0, PYTHON_CALL_S, 0)
    assert node.model
    return NodePlan(
        node.name, node.op, node.model.model, "megatron", mesh, candidate.micro_batch,
        0.0, candidate.time_s, candidate.working_bytes,
    )  # fmt: skip


def _step_s(draft: Draft, nodes: tuple[NodePlan, ...]) -> float:
    """Sum of nodes, weight edges and data edges: colocated nodes run one after the other."""
    plans = {n.node: n for n in nodes}
    total = sum(n.time_s for n in nodes)
    for edge in draft.weight_edges:
        shape, dtype = draft.shapes[edge.model], draft.graph.model(edge.model).dtype
        meshes = plans[edge.trainer].mesh, plans[edge.reader].mesh
        total += lower_weights(shape, dtype, *meshes, draft.cluster).time_s
    for consumer, value in draft.graph.edges():
        producer = draft.graph.node(value.source.node)
        source = output_layout(producer, plans[producer.name].mesh, value.type)
        target = input_layout(plans[consumer.name].mesh, value.type)
        if source != target:
            total += lower_rows((value.type,), source, target, draft.cluster).time_s
    return total
