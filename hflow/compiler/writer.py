"""Writing a program: values get handles, edges are lowered, instructions know what they wait for."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from hflow.compiler.lowering import data_edge, lower_rows
from hflow.compiler.script import Key, Script
from hflow.compiler.state import Draft
from hflow.cost.comm import host_transfer_s
from hflow.cost.memory import optimizer_bytes, weight_bytes
from hflow.graph.ir import Graph, Input, Node
from hflow.plan.edges import DataEdge, Edge
from hflow.plan.layout import Box, Layout
from hflow.plan.node_plan import NodePlan
from hflow.plan.ports import input_layout, output_layout
from hflow.plan.program import Await, Call, Offload, Onload, Recall, Transfer
from hflow.plan.replicas import Instance, instance_of

Pieces = frozenset[tuple[int, Box]]


@dataclass
class Writer:
    """The program so far. `at`: the handles of each value, and the boxes in which they lie."""

    draft: Draft
    graph: Graph
    edges: list[Edge] = field(default_factory=list[Edge])
    script: Script = field(default_factory=Script)
    at: dict[str, list[tuple[str, Pieces]]] = field(default_factory=dict[str, list[tuple[str, Pieces]]])

    def find(self, value: str, layout: Layout, rows: int) -> str | None:
        """The handle of `value` if some handle has it on all devices of `layout`, in these very boxes."""
        wanted = _pieces(layout, rows)
        return next((handle for handle, pieces in self.at.get(value, ()) if wanted <= pieces), None)

    def put(self, value: str, layout: Layout, rows: int, handle: str) -> None:
        self.at.setdefault(value, []).append((handle, _pieces(layout, rows)))

    def read(self, node: Node) -> dict[str, str]:
        """Bring a node's inputs to where it reads them; their handles by port.

        One lowered edge per producer and layout; a transfer where the values do not lie so already.
        """
        handles: dict[str, str] = {}
        for values in self._together(node):
            if values[0].lag:
                self._recall(values)
            edge = self._edge(node, values)
            self.edges.append(edge)
            layout, rows = edge.target_layout, values[0].type.rows
            names = dict.fromkeys(map(value_name, values))
            missing = {name: f"{name}@{node.name}" for name in names if not self.find(name, layout, rows)}
            if missing:
                self._transfer(edge, {value_name(v): v.source.port for v in values}, missing)
            for name, handle in missing.items():
                self.put(name, layout, rows, handle)
            handles |= {v.port: self.find(value_name(v), layout, rows) or "" for v in values}
        return handles

    def call(self, node: Node, inputs: dict[str, str], awaited: bool = False) -> None:
        """The call of a node; around it, what it keeps in the host's memory comes and goes.

        It is onloaded no sooner than the node can run.

        Args:
            awaited: its outputs come later, with `wait`.
        """
        plan = self.draft.node_plan(node.name)
        reads, writes = self._touched(node, plan)
        if plan.offload:
            onload = Onload(node.name, plan.mesh.devices, time_s=self._onload_s(plan))
            self.script.add(onload, reads | set(inputs.values()), writes | {("onload", node.name)})
        outputs = {} if awaited else self.write_outputs(node)
        call = Call(node.name, plan.mesh.devices, inputs, outputs, time_s=plan.time_s)
        self.script.add(call, reads | {("onload", node.name)}, writes | {("call", node.name)})
        if plan.offload:
            seconds = self._onload_s(plan) if node.op == "train" else 0.0  # the host still has frozen weights
            offload = Offload(node.name, plan.mesh.devices, time_s=seconds)
            self.script.add(offload, {("call", node.name)})

    def wait(self, node: Node) -> None:
        """The end of a node that was called."""
        plan = self.draft.node_plan(node.name)
        reads, _ = self._touched(node, plan)
        await_ = Await(node.name, plan.mesh.devices, self.write_outputs(node))
        self.script.add(await_, reads, {("call", node.name)})

    def _touched(self, node: Node, plan: NodePlan) -> tuple[set[Key], set[Key]]:
        """What a call reads beside its inputs, and what it overwrites: it comes after the nodes of `after`,
        and a training after all nodes that use its model, be it in a copy of their own."""
        reads: set[Key] = {("call", first) for first in node.after}
        if node.model is None:
            return reads, set()
        model = node.model.model
        if node.op == "train":
            return reads, {Instance(model, plan.sharding), ("model", model)}
        return reads | {instance_of(node, plan.sharding), ("model", model)}, set()

    def _onload_s(self, plan: NodePlan) -> float:
        """Of the optimizer's state, or of frozen weights."""
        assert plan.model
        dtype = self.draft.graph.model(plan.model).dtype
        what = self.draft.shapes[plan.model], dtype, plan.mesh
        trains = plan.kind == "train"
        size = optimizer_bytes(*what, plan.strategy) if trains else weight_bytes(*what, False, plan.strategy)
        return host_transfer_s(size, self.draft.cluster)

    def write_outputs(self, node: Node) -> dict[str, str]:
        """Handles, by port, for what a node makes."""
        mesh = self.draft.node_plan(node.name).mesh
        outputs = {o.port: f"{node.name}.{o.port}" for o in node.outputs}
        for output in node.outputs:
            layout = output_layout(node, mesh, output.type)
            self.put(outputs[output.port], layout, output.type.rows, outputs[output.port])
        return outputs

    @contextmanager
    def body(self) -> Generator[Script]:
        """Instructions written inside go to the yielded script: the body of a loop."""
        outer, self.script = self.script, Script()
        yield self.script
        self.script = outer

    def _together(self, node: Node) -> list[list[Input]]:
        """The node's inputs in groups that move as one: same producer and age, same layouts."""
        groups: dict[tuple[object, ...], list[Input]] = {}
        for value in node.inputs:
            ends = self._layouts(node, value)
            key = (value.source.node, value.lag, value.init, value.type.rows, *ends)
            groups.setdefault(key, []).append(value)
        return list(groups.values())

    def _layouts(self, node: Node, value: Input) -> tuple[Layout, Layout]:
        producer = self.draft.graph.node(value.source.node)
        meshes = (self.draft.node_plan(n.name).mesh for n in (producer, node))
        source, target = meshes
        return output_layout(producer, source, value.type), input_layout(node, target, value.type)

    def _edge(self, node: Node, values: list[Input]) -> DataEdge:
        producer = values[0].source.node
        source, target = self._layouts(node, values[0])
        by_port = {v.source.port: v.type for v in values}
        age = f"@-{values[0].lag}" if values[0].lag else ""
        name = f"{producer}.{','.join(by_port)}{age} -> {node.name}"
        ends = (producer, source), (node.name, target)
        return data_edge(name, tuple(by_port), tuple(by_port.values()), *ends, self.draft.cluster)

    def _recall(self, values: list[Input]) -> None:
        """Values of earlier steps enter the store once, where their producer made them."""
        producer = self.draft.graph.node(values[0].source.node)
        mesh = self.draft.node_plan(producer.name).mesh
        layout = output_layout(producer, mesh, values[0].type)
        new = [v for v in values if not self.find(value_name(v), layout, 1)]
        for value in new:
            self.put(value_name(value), layout, 1, value_name(value))
        if new:
            outputs = {v.source.port: value_name(v) for v in new}
            recall = Recall(producer.name, mesh.devices, outputs, values[0].lag, values[0].init)
            self.script.add(recall, carried(producer.name, outputs))

    def _transfer(self, edge: DataEdge, ports: dict[str, str], missing: dict[str, str]) -> None:
        """`inputs` and `outputs` map the moved ports to handles at the source and at the target."""
        inputs = {ports[name]: name for name in missing}
        outputs = {ports[name]: handle for name, handle in missing.items()}
        devices = tuple(sorted({*edge.source_mesh.devices, *edge.target_mesh.devices}))
        moved = tuple(type_ for port, type_ in zip(edge.ports, edge.types) if port in inputs)
        lowered = lower_rows(moved, edge.source_layout, edge.target_layout, self.draft.cluster)
        number = len(self.edges) - 1
        self.script.add(Transfer(edge.target, devices, number, inputs, outputs, time_s=lowered.time_s))


def carried(node: str, ports: Iterable[str]) -> set[Key]:
    """What is remembered of a node from one step to the next."""
    return {("carried", f"{node}.{port}") for port in ports}


@lru_cache(maxsize=4096)
def _pieces(layout: Layout, rows: int) -> Pieces:
    return frozenset(layout.boxes((rows,)).items())


def value_name(value: Input) -> str:
    """``node.port``, also the value's first handle; values of earlier steps have names of their own."""
    return f"{value.source}@-{value.lag}:{value.init:g}" if value.lag else str(value.source)
