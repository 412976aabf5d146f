"""Lower every edge and write the program: what each worker does, node after node."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from hflow.compiler.donation import donates
from hflow.compiler.lowering import weight_edge
from hflow.compiler.order import node_order
from hflow.compiler.script import Key
from hflow.compiler.state import Draft, WeightRead
from hflow.compiler.writer import Writer, carried
from hflow.graph.ir import Graph, Node
from hflow.plan.program import Carry, Loop, Program, Release, SyncWeights
from hflow.plan.replicas import Instance, instance_of


def lower_edges(draft: Draft) -> Draft:
    """Raises HF307 when a model would have to be read after it has been trained in the same step."""
    evaluation = draft.evaluation_graph
    return replace(
        draft,
        step=_StepWriter(draft, draft.graph).program(),
        evaluation=_StepWriter(draft, evaluation).program() if evaluation else None,
    )


class _StepWriter:
    """Writes the program of one graph; only that of the training graph has a memory across steps.

    `copies`: the weights that readers have of their own for this step only, by the node that gets them first.
    `donated`: for each copy to which a trainer donates its memory, the trainer's instance.
    """

    def __init__(self, draft: Draft, graph: Graph):
        self.draft, self.graph = draft, graph
        self.writer = Writer(draft, graph)
        self.evaluates = graph is draft.evaluation_graph
        self.renewed: set[Instance] = set()
        self.trained: set[str] = set()
        self.copies: dict[Instance, str] = {}
        self.donated: dict[Instance, Instance] = {}
        self.order = node_order(graph)

    def program(self) -> Program:
        loops = {n.name: n for n in self.order if n.op == "repeat"}
        if not self.evaluates:
            self._refresh()
        for node in (n for n in self.order if n.region not in loops):
            if node.op == "repeat":
                inner = [n for n in self.order if n.region == node.name]
                self._loop(node, inner)
                self._release_after(inner)
                continue
            inputs = self.writer.read(node)
            self._weights_before(node, {*inputs.values(), *(("call", first) for first in node.after)})
            self._call(node, inputs)
            self._release_after([node])
        if not self.evaluates:
            self._carry()
        return Program(self.graph, tuple(self.writer.edges), tuple(self.writer.script.instructions))

    def _call(self, node: Node, inputs: dict[str, str]) -> None:
        """Weights in flight come between the beginning and the end of the node that they are for."""
        if not node.in_flight:
            self.writer.call(node, inputs)
            return
        self.writer.call(node, inputs, awaited=True)
        self._move(e for e in self.draft.weight_edges if e.reader == node.name)
        self.writer.wait(node)

    def _loop(self, region: Node, inner: list[Node]) -> None:
        """The rounds of a region. Models do not change meanwhile, so weights move before the first."""
        with self.writer.body() as body:
            for node in (*inner, replace(region, outputs=())):
                self.writer.call(node, self.writer.read(node))
        for node in inner:
            self._weights_before(node, body.reads)
        devices = tuple(sorted(self.draft.node_plan(region.name).mesh.devices))
        outputs = self.writer.write_outputs(region)
        loop = Loop(region.name, devices, tuple(body.instructions), outputs)
        self.writer.script.add(loop, body.reads, body.writes)

    def _weights_before(self, node: Node, needed: Set[Key]) -> None:
        """What must move before a node runs: the newest weights to a reader, once all else is there that the
        reader needs; before the first training of a model in a step, the present ones to the readers that
        are one update behind."""
        if node.model is None:
            return
        edges = self.draft.weight_edges
        if node.op != "train":
            newest = (e for e in edges if e.reader == node.name and not e.every and not node.model.lag)
            self._move(newest, needed)
        elif node.model.model not in self.trained:
            self.trained.add(node.model.model)
            self._move(e for e in edges if e.model == node.model.model and e.lag)

    def _refresh(self) -> None:
        self._move(e for e in self.draft.weight_edges if e.every)

    def _move(self, edges: Iterable[WeightRead], needed: Set[Key] = frozenset()) -> None:
        """Each instance is renewed once; one that is the trainer's own needs no instruction.

        `needed`: what must be there before.
        """
        for edge in edges:
            trainer, plan = self.draft.node_plan(edge.trainer), self.draft.node_plan(edge.reader)
            reader = instance_of(self.graph.node(edge.reader), plan.sharding)
            if reader in self.renewed:
                continue
            assert trainer.model and not (edge.every and plan.offload), edge
            source = Instance(trainer.model, trainer.sharding)
            self._lower(edge, trainer.model, source, reader)
            if reader == source:
                continue
            self.renewed.add(reader)
            if not edge.every and not reader.lag:
                self.copies[reader] = edge.reader
            lowered = self.writer.edges[-1]
            devices = tuple(sorted({*source.mesh.devices, *reader.mesh.devices}))
            number, seconds = len(self.writer.edges) - 1, lowered.time_s / max(1, edge.every)
            donated = reader in self.copies and donates(self.draft, self.graph, self.order, source, reader)
            if donated:
                self.donated[reader] = source
            sync = SyncWeights(edge.reader, devices, number, edge.every, donated, time_s=seconds)
            self.writer.script.add(sync, {source, *needed}, {reader, *self._donor(reader)})

    def _lower(self, edge: WeightRead, trained: str, source: Instance, target: Instance) -> None:
        ends = (edge.trainer, source.sharding), (edge.reader, target.sharding)
        dtype, shape = self.draft.graph.model(trained).dtype, self.draft.shapes[edge.model]
        name, shared = f"{trained} => {edge.reader}", source == target
        self.writer.edges.append(weight_edge(name, dtype, shape, *ends, self.draft.cluster, shared))

    def _release_after(self, nodes: Iterable[Node]) -> None:
        """Drop the copies that `nodes` were the last to read."""
        for node in nodes:
            mine = instance_of(node, self.draft.node_plan(node.name).sharding) if node.model else None
            if mine in self.copies and node == self._last_reader(mine):
                release = Release(self.copies[mine], mine.mesh.devices, donates=mine in self.donated)
                self.writer.script.add(release, writes={mine, *self._donor(mine)})

    def _donor(self, copy: Instance) -> set[Instance]:
        """The trainer's weights, where they give their memory to the copy."""
        return {self.donated[copy]} if copy in self.donated else set()

    def _last_reader(self, instance: Instance) -> Node:
        readers = (n for n in self.order if n.model and n.op != "train")
        plans = ((n, self.draft.node_plan(n.name)) for n in readers)
        return [n for n, plan in plans if instance_of(n, plan.sharding) == instance][-1]

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
                carry = Carry(node, devices, {port: f"{node}.{port}"}, lag)
                self.writer.script.add(carry, writes=carried(node, [port]))
