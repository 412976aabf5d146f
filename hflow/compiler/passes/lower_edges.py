"""Lower every edge and write the program: what each worker does, in an order all of them share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import networkx as nx

from hflow.compiler.draft import Draft, WeightEdge
from hflow.compiler.instances import Instance, instance_of
from hflow.compiler.lowering import weight_edge
from hflow.compiler.plan import Instruction, Program
from hflow.compiler.writer import Writer, finished
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.graph import Graph, Node


def lower_edges(draft: Draft) -> Draft:
    """Raises HF307 when a model would have to be read after it has been trained in the same step."""
    evaluation = draft.evaluation_graph
    return replace(
        draft,
        step=_Step(draft, draft.graph).program(),
        evaluation=_Step(draft, evaluation).program() if evaluation else None,
    )


def node_order(graph: Graph) -> tuple[Node, ...]:
    """Topological order in which a model is read in a step before it is trained.

    Raises:
        HflowError: HF307 when there is none.
    """
    dag = graph.dag()
    for reader in (n for n in graph.nodes if n.model and n.op != "train"):
        assert reader.model
        whole = [reader.name] if graph.region(reader.region).until is None else [reader.name, reader.region]
        trainers = graph.trainers(reader.model.model)
        dag.add_edges_from((first, trainer.name) for trainer in trainers for first in whole)
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    try:
        order = list(nx.lexicographical_topological_sort(dag, key=position.__getitem__))
    except nx.NetworkXUnfeasible:
        raise HflowError(_read_after_training(graph, dag)) from None
    return tuple(map(graph.node, order))


def _read_after_training(graph: Graph, dag: nx.DiGraph[str]) -> Diagnostic:
    cycle = next(names for names in nx.strongly_connected_components(dag) if len(names) > 1)
    reader = next(n for n in graph.nodes if n.name in cycle and n.model and n.op != "train")
    assert reader.model
    trainer = graph.trainers(reader.model.model)[0].name
    message = (
        f"`{reader.name}` reads `{reader.model.model}` after `{trainer}` has trained it in the same step,"
        " which is not scheduled"
    )
    return Diagnostic("HF307", message, reader.span, "a step reads all models before it trains them")


class _Step:
    """Writes the program of one graph; only that of the training graph has a memory across steps."""

    def __init__(self, draft: Draft, graph: Graph):
        self.draft, self.graph = draft, graph
        self.writer = Writer(draft, graph)
        self.evaluates = graph is draft.evaluation_graph
        self.renewed: set[Instance] = set()
        self.trained: set[str] = set()

    def program(self) -> Program:
        order = node_order(self.graph)
        loops = {n.name: n for n in order if n.op == "repeat"}
        if not self.evaluates:
            self._refresh()
        for node in (n for n in order if n.region not in loops):
            if node.op == "repeat":
                self._loop(node, [n for n in order if n.region == node.name])
                continue
            self._weights_before(node)
            self.writer.call(node, self.writer.read(node))
        if not self.evaluates:
            self._carry()
        return Program(self.graph, tuple(self.writer.edges), finished(self.writer.instructions))

    def _loop(self, region: Node, inner: list[Node]) -> None:
        """The rounds of a region. Models do not change meanwhile, so weights move before the first."""
        for node in inner:
            self._weights_before(node)
        with self.writer.body() as body:
            for node in (*inner, replace(region, outputs=())):
                self.writer.call(node, self.writer.read(node))
        devices = tuple(sorted(self.draft.node_plan(region.name).mesh.devices))
        outputs = self.writer.write_outputs(region)
        loop = Instruction("loop", region.name, devices, outputs=outputs, body=finished(body))
        self.writer.instructions.append(loop)

    def _weights_before(self, node: Node) -> None:
        """What must move before a node runs: the newest weights to a reader; before the first training
        of a model in a step, the present ones to the readers that are one update behind."""
        if node.model is None:
            return
        edges = self.draft.weight_edges
        if node.op != "train":
            self._move(e for e in edges if e.reader == node.name and not e.every and not node.model.lag)
        elif node.model.model not in self.trained:
            self.trained.add(node.model.model)
            self._move(e for e in edges if e.model == node.model.model and e.lag)

    def _refresh(self) -> None:
        self._move(e for e in self.draft.weight_edges if e.every)

    def _move(self, edges: Iterable[WeightEdge]) -> None:
        """Each instance is renewed once; one that is the trainer's own needs no instruction."""
        for edge in edges:
            source, target = (self.draft.node_plan(name).sharding for name in (edge.trainer, edge.reader))
            reader = instance_of(self.graph.node(edge.reader), target)
            if reader in self.renewed:
                continue
            shared = reader == Instance(self._trained(edge), source)
            ends = (edge.trainer, source), (edge.reader, target)
            name = f"{self._trained(edge)} => {edge.reader}"
            dtype = self.draft.graph.model(self._trained(edge)).dtype
            shape = self.draft.shapes[edge.model]
            self.writer.edges.append(weight_edge(name, dtype, shape, *ends, self.draft.cluster, shared))
            if shared:
                continue
            self.renewed.add(reader)
            devices = tuple(sorted({*source.mesh.devices, *target.mesh.devices}))
            number = len(self.writer.edges) - 1
            self.writer.instructions.append(
                Instruction("weights", edge.reader, devices, edge=number, every=edge.every)
            )

    def _trained(self, edge: WeightEdge) -> str:
        trainer = self.draft.graph.node(edge.trainer)
        assert trainer.model
        return trainer.model.model

    def _carry(self) -> None:
        """At the end of the step, keep what later steps recall."""
        lags: dict[str, dict[str, int]] = {}
        for _, value in self.graph.edges():
            if value.lag:
                ports = lags.setdefault(value.source.node, {})
                ports[value.source.port] = max(value.lag, ports.get(value.source.port, 0))
        for node, ports in lags.items():
            devices = self.draft.node_plan(node).mesh.devices
            for port, lag in ports.items():
                inputs = {port: f"{node}.{port}"}
                self.writer.instructions.append(Instruction("carry", node, devices, inputs, lag=lag))
