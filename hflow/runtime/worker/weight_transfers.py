"""Weights go over the weight edges of a plan, as one worker takes part in it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hflow.graph.ir import Graph, Model
from hflow.plan.edges import WeightEdge
from hflow.plan.frozen import moved_parameters
from hflow.plan.model_shape import ModelShape
from hflow.plan.plan import Plan
from hflow.plan.program import Program, SyncWeights, with_bodies
from hflow.plan.replicas import Instance, instance_of
from hflow.plan.run_state import OlderWeights, is_average, older_edges
from hflow.runtime.engines.implementation import implementation
from hflow.runtime.engines.protocol import AveragedWeights, ModelWeights, NodeError, Weights
from hflow.runtime.rows import TORCH_DTYPES
from hflow.runtime.worker.changed_weights import SentWeights, WrongChecksum
from hflow.runtime.worker.models import Engines
from hflow.runtime.worker.move_weights import move_weights, tell_version
from hflow.runtime.worker.peer_groups import PeerGroups
from hflow.runtime.worker.route import Route, make_route
from hflow.runtime.worker.transfer import Received
from hflow.runtime.worker.world import World

EdgeKey = tuple[int, int]  # a program's number in the plan, and the edge's number in the program


class WeightTransfers:
    """All methods but `changed` and `source` are collective over the devices of their edges."""

    def __init__(self, plan: Plan, world: World, engines: Engines, peers: PeerGroups):
        self.plan, self.world, self.engines, self.peers = plan, world, engines, peers
        self._routes: dict[EdgeKey, tuple[Route, ...]] = {}  # several where weights move in parts
        self._sent: dict[EdgeKey, SentWeights] = {}  # of those over which only changed weights go

    def send(self, sync: SyncWeights, program: Program, step: int) -> Received:
        """Execute an instruction of step number `step`.

        Raises:
            NodeError: HF410: a reader's weights are then not those of its trainer.
        """
        edge = program.weight_edge(sync)
        if average := self._average(edge, program.graph):
            average.advance(step)
        received = self._send(sync, program)
        source = self.source(edge)
        if sync.donates and source:
            source.donate()
        return received

    def changed(self, sync: SyncWeights, program: Program) -> tuple[float, float] | None:
        """How many of how many weights that this worker sent last had changed, where it compared them."""
        sent = self._sent.get(self._key(sync, program))
        return (float(sent.changed), float(sent.compared)) if sent and sent.compared else None

    def send_again(self, older: OlderWeights) -> None:
        """Let the readers of older weights have what lies at their trainer now."""
        edges = older_edges(self.plan)
        self._send_all(lambda sync: edges.get(sync.edge) == older)

    def send_averages(self) -> None:
        """Let the models that take over averages have them as they are now."""
        step = self.plan.step
        self._send_all(lambda sync: is_average(self.plan.graph, step.weight_edge(sync)))

    def source(self, edge: WeightEdge) -> ModelWeights | None:
        """The trained weights that a weight edge begins with, where this device has some."""
        return self.engines.weights(Instance(self._trained(edge).name, edge.source_sharding))

    def _send_all(self, chosen: Callable[[SyncWeights], bool]) -> None:
        for sync in (i for i in with_bodies(self.plan.step.instructions) if isinstance(i, SyncWeights)):
            if chosen(sync) and self.world.rank in sync.devices:
                self._send(sync, self.plan.step)

    def _send(self, sync: SyncWeights, program: Program) -> Received:
        edge = program.weight_edge(sync)
        reader = instance_of(program.graph.node(edge.target), edge.target_sharding)
        source = self._average(edge, program.graph) or self.source(edge)
        target = self.engines.weights(reader)
        trained, keeps_values = self._trained(edge), edge.changed is not None
        dtype = TORCH_DTYPES["f32" if is_average(program.graph, edge) else trained.dtype]
        peers = self.peers.of(edge.source_mesh, edge.target_mesh)
        tell_version(edge, source, target, self.world, peers)  # and so wait for the trainer
        if target:
            target.allocate(keeps_values)
        key = self._key(sync, program)
        if key not in self._routes:
            self._routes[key] = self._make_routes(edge, self.plan.shapes[trained.name], source, target)
        if keeps_values:
            self._sent.setdefault(key, SentWeights()).begin()
        received = Received()
        for route in self._routes[key]:
            received += self._moved(edge, route, source, target, dtype, self._sent.get(key))
            if target:
                target.hand_over()
        return received

    def _moved(
        self,
        edge: WeightEdge,
        route: Route,
        source: Weights | None,
        target: Weights | None,
        dtype: torch.dtype,
        sent: SentWeights | None,
    ) -> Received:
        peers = self.peers.of(edge.source_mesh, edge.target_mesh)
        try:
            return move_weights(route, source, target, dtype, self.world, peers, sent)
        except WrongChecksum as error:
            raise NodeError(edge.target, str(error), "HF410") from error

    def _make_routes(
        self, edge: WeightEdge, shape: ModelShape, source: Weights | None, target: ModelWeights | None
    ) -> tuple[Route, ...]:
        """One for each part in which the target's engine takes its weights."""
        moved = frozenset(parameter.name for parameter in moved_parameters(shape))
        parts = implementation(edge.target_sharding.engine).parts(shape, edge.target_mesh.tp)
        chosen = (moved if names is None else moved & {*names} for names in parts)
        rank = self.world.rank
        readable = self.world.neighbours.pairs if edge.changed is None else frozenset[tuple[int, int]]()
        return tuple(make_route(edge.copies, shape, source, target, rank, own, readable) for own in chosen)

    def _average(self, edge: WeightEdge, graph: Graph) -> AveragedWeights | None:
        """The average of trained weights that an edge of a program of `graph` begins with, if it is here."""
        if not is_average(graph, edge):
            return None
        trainer = self.engines.models.get(Instance(self._trained(edge).name, edge.source_sharding))
        reader = graph.model_of(graph.node(edge.target))
        return trainer.averages[reader.name] if trainer else None

    def _trained(self, edge: WeightEdge) -> Model:
        """The model with whose weights a weight edge begins."""
        return self.plan.graph.model_of(self.plan.graph.node(edge.source))

    def _key(self, sync: SyncWeights, program: Program) -> EdgeKey:
        return next(n for n, own in enumerate(self.plan.programs) if own is program), sync.edge
