"""Weights of a step: when they move from trainers to readers, and how long readers keep copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from hflow.compiler.donation import donates
from hflow.compiler.lowering import UnloweredWeightEdge
from hflow.compiler.program_builder.script import Key
from hflow.compiler.program_builder.unfinished import UnfinishedProgram
from hflow.compiler.state import WeightRead
from hflow.cost.compute import average_s
from hflow.cost.redistribution import waking_s
from hflow.graph.ir import Node, step_node
from hflow.plan.program import Release, SyncWeights
from hflow.plan.replicas import Instance


class WeightMoves:
    """Moves weights over the weight edges, each instance once per step.

    `copies`: the weights that readers have of their own for this step only, by the node that gets them first.
    `donated`: for each copy to which a trainer donates its memory, the trainer's instance.
    """

    def __init__(self, program: UnfinishedProgram):
        self.program, self.edges = program, tuple(_edges(program))
        self.renewed: set[Instance] = set()
        self.trained: set[str] = set()
        self.copies: dict[Instance, str] = {}
        self.donated: dict[Instance, Instance] = {}

    def refresh(self) -> None:
        """At the beginning of a step, to models that take over the weights of others."""
        self._move(e for e in self.edges if e.every)

    def in_flight(self, node: Node) -> None:
        """To a node that generates meanwhile."""
        self._move(e for e in self.edges if e.reader == node.name)

    def before(self, node: Node, needed: Set[Key]) -> None:
        """What must move before a node runs: the newest weights to a reader, once all else is there that the
        reader needs; before the first training of a model in a step, the present ones to the readers that
        are one update behind."""
        if node.model is None:
            return
        if node.op != "train":
            newest = (e for e in self.edges if e.reader == node.name and not e.every and not node.model.lag)
            self._move(newest if not node.model.base else (), needed)
        elif node.model.model not in self.trained:
            self.trained.add(node.model.model)
            self._move(e for e in self.edges if e.model == node.model.model and e.lag)

    def release_after(self, nodes: Iterable[Node]) -> None:
        """Drop the copies that `nodes` were the last to read."""
        for node in (n for n in nodes if n.model):
            mine = self.program.instance(node)
            if mine in self.copies and node == self._last_reader(mine):
                release = Release(self.copies[mine], mine.mesh.devices, donates=mine in self.donated)
                self.program.script.add(release, writes={mine, *self._donor(mine)})

    def _move(self, edges: Iterable[WeightRead], needed: Set[Key] = frozenset()) -> None:
        """Each instance is renewed once; one that is the trainer's own needs no instruction.

        `needed`: what must be there before.
        """
        program = self.program
        for edge in edges:
            source = program.instance(program.draft.graph.node(edge.trainer))
            reader = program.instance(program.graph.node(edge.reader))
            if reader in self.renewed:
                continue
            assert not (edge.every and program.plans[edge.reader].offload), edge
            moved = self._edge(edge, source, reader)
            program.edges.append(moved)
            if reader == source:
                continue
            self.renewed.add(reader)
            if not edge.every and not reader.lag and not program.draft.shapes[edge.model].adapter:
                self.copies[reader] = edge.reader
            if reader in self.copies and self._donates(source, reader):
                self.donated[reader] = source
            devices = tuple(sorted({*source.mesh.devices, *reader.mesh.devices}))
            number = len(program.edges) - 1
            seconds = moved.time_s(program.draft.cluster) + self._average_s(edge, source)
            seconds += 0.0 if edge.every else self._waking_s(moved, reader)
            sync = SyncWeights(
                edge.reader, devices, number, edge.every, reader in self.donated,
                time_s=seconds / max(1, edge.every),
            )  # fmt: skip
            program.script.add(sync, {source, *needed}, {reader, *self._donor(reader)})

    def _edge(self, edge: WeightRead, source: Instance, target: Instance) -> UnloweredWeightEdge:
        draft = self.program.draft
        dtype = "f32" if self._is_average(edge) else draft.graph.model(source.model).weight_dtype
        changed = self.program.graph.node(edge.reader).model_use.delta_weights
        return UnloweredWeightEdge(
            f"{source.model} => {edge.reader}", edge.trainer, edge.reader, draft.shapes[edge.model],
            dtype, source.sharding, target.sharding, source == target, changed,
        )  # fmt: skip

    def _is_average(self, edge: WeightRead) -> bool:
        """Whether what moves is a moving average, which is of float32, and not the weights themselves."""
        refresh = self.program.draft.graph.model(edge.model).refresh
        return refresh is not None and refresh.is_average

    def _average_s(self, edge: WeightRead, source: Instance) -> float:
        draft = self.program.draft
        if not self._is_average(edge):
            return 0.0
        return average_s(draft.shapes[edge.model], source.mesh, draft.cluster)

    def _waking_s(self, edge: UnloweredWeightEdge, reader: Instance) -> float:
        return waking_s(
            edge.shape, edge.dtype, reader.sharding.engine, reader.lag, self.program.draft.cluster
        )

    def _donates(self, source: Instance, copy: Instance) -> bool:
        program = self.program
        return donates(program.draft, program.graph, program.users(), source, copy)

    def _donor(self, copy: Instance) -> set[Instance]:
        """The trainer's weights, where they give their memory to the copy."""
        return {self.donated[copy]} if copy in self.donated else set()

    def _last_reader(self, instance: Instance) -> Node:
        users = self.program.users()
        return [node for node, own in users if node.op != "train" and own == instance][-1]


def _edges(program: UnfinishedProgram) -> Iterator[WeightRead]:
    """The weight edges of the step, in an evaluation to the nodes that stand for their readers there."""
    if program.graph is program.draft.graph:
        yield from program.draft.weight_edges
        return
    for edge in program.draft.weight_edges:
        readers = (node.name for node in program.graph.nodes if step_node(node.name) == edge.reader)
        yield from (replace(edge, reader=reader) for reader in readers)
