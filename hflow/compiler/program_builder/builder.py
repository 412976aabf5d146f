"""The program of a step: what happens in it, in which order, and what waits for what. It is said here alone.

The planner builds the program of every full assignment that it prices, `lower_edges` that of the plan. All
instructions have their times; which device sends what over an edge is found out by `lower_edges`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hflow.compiler.lowering import UnloweredEdge
from hflow.compiler.order import node_order
from hflow.compiler.program_builder.input_moves import InputMoves
from hflow.compiler.program_builder.row_moves import RowMoves
from hflow.compiler.program_builder.script import Key
from hflow.compiler.program_builder.unfinished import UnfinishedProgram
from hflow.compiler.program_builder.weight_moves import WeightMoves
from hflow.compiler.state import Draft
from hflow.cost.comm import host_transfer_s
from hflow.cost.residency import residency
from hflow.graph.ir import Graph, Node
from hflow.plan.frozen import trained_with
from hflow.plan.node_plan import NodePlan
from hflow.plan.program import Await, Call, Instruction, Loop, Offload, Onload
from hflow.plan.replicas import Instance

Built = tuple[list[Instruction], list[UnloweredEdge]]


class ProgramBuilder:
    """Builds the programs of one graph of a draft: the training graph, or one that evaluates it."""

    def __init__(self, draft: Draft, graph: Graph):
        self.draft, self.graph, self.order = draft, graph, node_order(graph)
        self._inputs = InputMoves(graph)

    def build(self, plans: Iterable[NodePlan]) -> Built:
        """Instructions, in an order in which they could run one by one, and the edges that they name.

        Args:
            plans: of the graph's nodes, at least.
        """
        by_node = {plan.node: plan for plan in plans}
        program = UnfinishedProgram(self.draft, self.graph, self.order, self._inputs, by_node)
        _Walk(program).walk()
        return program.script.instructions, program.edges


class _Walk:
    """One pass over the nodes. Only the training graph has a memory across steps."""

    def __init__(self, program: UnfinishedProgram):
        self.program, self.rows, self.weights = program, RowMoves(program), WeightMoves(program)
        self.evaluates = program.graph is not program.draft.graph

    def walk(self) -> None:
        order = self.program.order
        loops = {n.name for n in order if n.op == "repeat"}
        if not self.evaluates:
            self.weights.refresh()
        for node in (n for n in order if n.region not in loops):
            inner = [n for n in order if n.region == node.name] if node.op == "repeat" else []
            if inner:
                self._loop(node, inner)
            else:
                self._node(node)
            self.weights.release_after(inner or [node])
        if not self.evaluates:
            self.rows.carry()

    def _node(self, node: Node) -> None:
        """Weights in flight come between the beginning and the end of the node that they are for."""
        inputs = self.rows.read(node)
        self.weights.before(node, {*inputs.values(), *(("call", first) for first in node.after)})
        self._call(node, inputs, awaited=node.in_flight)
        if node.in_flight:
            self.weights.in_flight(node)
            self._await(node)

    def _loop(self, region: Node, inner: list[Node]) -> None:
        """The rounds of a region. Models do not change meanwhile, so weights move before the first."""
        with self.program.body() as body:
            for node in (*inner, replace(region, outputs=())):
                self._call(node, self.rows.read(node))
        for node in inner:
            self.weights.before(node, body.reads)
        devices = tuple(sorted(self.program.plans[region.name].mesh.devices))
        loop = Loop(region.name, devices, tuple(body.instructions), self.rows.write(region))
        self.program.script.add(loop, body.reads, body.writes)

    def _call(self, node: Node, inputs: dict[str, str], awaited: bool = False) -> None:
        """The call of a node; around it, what it keeps in the host's memory comes and goes. It is onloaded no
        sooner than the node can run.

        Args:
            awaited: its outputs come later, with `_await`.
        """
        plan, script = self.program.plans[node.name], self.program.script
        reads, writes = self._touched(node)
        if plan.offload:
            onload = Onload(node.name, plan.mesh.devices, time_s=self._onload_s(node))
            script.add(onload, reads | set(inputs.values()), writes | {("onload", node.name)})
        outputs = {} if awaited else self.rows.write(node)
        call = Call(node.name, plan.mesh.devices, inputs, outputs, time_s=plan.time_s)
        script.add(call, reads | {("onload", node.name)}, writes | {("call", node.name)})
        if plan.offload:
            seconds = self._onload_s(node) if node.op == "train" else 0.0  # the host still has frozen weights
            script.add(Offload(node.name, plan.mesh.devices, time_s=seconds), {("call", node.name)})

    def _await(self, node: Node) -> None:
        """The end of a node that was called."""
        end = Await(node.name, self.program.plans[node.name].mesh.devices, self.rows.write(node))
        self.program.script.add(end, self._touched(node)[0], {("call", node.name)})

    def _touched(self, node: Node) -> tuple[set[Key], set[Key]]:
        """What a call reads beside its inputs, and what it overwrites: it comes after the nodes of `after`,
        and a training after all nodes that use its model, be it in a copy of their own."""
        reads: set[Key] = {("call", first) for first in node.after}
        if node.model is None:
            return reads, set()
        model, plan = node.model.model, self.program.plans[node.name]
        if node.op == "train":
            return reads, {Instance(model, plan.sharding), ("model", model)}
        return reads | {self.program.instance(node), ("model", model)}, set()

    def _onload_s(self, node: Node) -> float:
        """Of the optimizer's state, or of frozen weights."""
        draft, plan = self.program.draft, self.program.plans[node.name]
        model = draft.graph.model_of(node)
        use = "train" if node.op == "train" else "frozen"
        what = model, draft.shapes[model.name], plan.mesh, plan.strategy, draft.cluster
        trained = trained_with(draft.graph, model.name)
        kept = residency(*what, use, offload=True, trained=trained)
        return host_transfer_s(kept.loaded_bytes, draft.cluster)
