"""Rows of a step: where the values of each node lie, and the transfers that bring them to their readers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hflow.compiler.lowering import UnloweredDataEdge
from hflow.compiler.program_builder.script import Key
from hflow.compiler.program_builder.unfinished import UnfinishedProgram
from hflow.graph.ir import Input, Node
from hflow.plan.layout import Layout
from hflow.plan.ports import input_layout, output_layout
from hflow.plan.program import Carry, Recall, Transfer

Ends = tuple[Layout, Layout]  # of an edge: where the values are made, and where they are read


class RowMoves:
    """Values get handles; one that lies in several layouts has a handle for each."""

    def __init__(self, program: UnfinishedProgram):
        self.program = program
        self._at: dict[str, list[tuple[str, Layout]]] = {}

    def read(self, node: Node) -> dict[str, str]:
        """Bring a node's inputs to where it reads them; their handles by port.

        One edge per producer and layout; a transfer where the values do not lie so already.
        """
        handles: dict[str, str] = {}
        for ends, values in self._together(node):
            if values[0].lag:
                self._recall(values, ends[0])
            edge = _edge(node, values, ends)
            self.program.edges.append(edge)
            layout, rows = edge.target_layout, values[0].type.rows
            names = dict.fromkeys(map(_name, values))
            missing = {name: f"{name}@{node.name}" for name in names if not self._find(name, layout, rows)}
            if missing:
                self._transfer(edge, {_name(v): v.source.port for v in values}, missing)
            for name, handle in missing.items():
                self._put(name, layout, handle)
            handles |= {v.port: self._find(_name(v), layout, rows) or "" for v in values}
        return handles

    def write(self, node: Node) -> dict[str, str]:
        """Handles, by port, for what a node makes."""
        mesh = self.program.plans[node.name].mesh
        outputs = {output.port: f"{node.name}.{output.port}" for output in node.outputs}
        for output in node.outputs:
            self._put(outputs[output.port], output_layout(node, mesh, output.type), outputs[output.port])
        return outputs

    def carry(self) -> None:
        """At the end of the step, keep what later steps recall."""
        lags: dict[str, dict[str, int]] = {}
        for _, value in self.program.graph.edges():
            if value.lag:
                ports = lags.setdefault(value.source.node, {})
                ports[value.source.port] = max(value.lag, ports.get(value.source.port, 0))
        for node, ports in lags.items():
            devices = self.program.plans[node].mesh.devices
            for port, lag in ports.items():
                carry = Carry(node, devices, {port: f"{node}.{port}"}, lag)
                self.program.script.add(carry, writes={_carried(node, port)})

    def _find(self, value: str, layout: Layout, rows: int) -> str | None:
        """The handle of `value` that has it on all devices of `layout`, in these very boxes, if one does."""
        places = self._at.get(value, ())
        found = (handle for handle, have in places if have is layout or _covers(have, layout, rows))
        return next(found, None)

    def _put(self, value: str, layout: Layout, handle: str) -> None:
        self._at.setdefault(value, []).append((handle, layout))

    def _together(self, node: Node) -> Iterable[tuple[Ends, list[Input]]]:
        """The node's inputs in groups that move as one: same producer and age, same layouts."""
        groups: dict[tuple[object, ...], tuple[Ends, list[Input]]] = {}
        for value in node.inputs:
            ends = self._layouts(node, value)
            key = (value.source.node, value.lag, value.init, value.type.rows, *ends)
            groups.setdefault(key, (ends, []))[1].append(value)
        return groups.values()

    def _layouts(self, node: Node, value: Input) -> Ends:
        producer = self.program.graph.node(value.source.node)
        source, target = (self.program.plans[n.name].mesh for n in (producer, node))
        return output_layout(producer, source, value.type), input_layout(node, target, value.type)

    def _recall(self, values: list[Input], layout: Layout) -> None:
        """Values of earlier steps enter the store once, in the `layout` in which their producer made them."""
        producer, devices = values[0].source.node, layout.mesh.devices
        new = [v for v in values if not self._find(_name(v), layout, 1)]
        for value in new:
            self._put(_name(value), layout, _name(value))
        if new:
            outputs = {v.source.port: _name(v) for v in new}
            recall = Recall(producer, devices, outputs, values[0].lag, values[0].init)
            self.program.script.add(recall, {_carried(producer, port) for port in outputs})

    def _transfer(self, edge: UnloweredDataEdge, ports: dict[str, str], missing: dict[str, str]) -> None:
        """`ports`: of each value. `missing`: of those that move, the handle at the target."""
        inputs = {ports[name]: name for name in missing}
        outputs = {ports[name]: handle for name, handle in missing.items()}
        meshes = edge.source_layout.mesh, edge.target_layout.mesh
        devices = tuple(sorted({device for mesh in meshes for device in mesh.devices}))
        number, seconds = len(self.program.edges) - 1, edge.time_s(inputs, self.program.draft.cluster)
        self.program.script.add(Transfer(edge.target, devices, number, inputs, outputs, time_s=seconds))


def _edge(node: Node, values: list[Input], ends: Ends) -> UnloweredDataEdge:
    producer = values[0].source.node
    by_port = {v.source.port: v.type for v in values}
    age = f"@-{values[0].lag}" if values[0].lag else ""
    name = f"{producer}.{','.join(by_port)}{age} -> {node.name}"
    return UnloweredDataEdge(name, producer, node.name, tuple(by_port), tuple(by_port.values()), *ends)


def _carried(node: str, port: str) -> Key:
    """What is remembered of a value from one step to the next."""
    return "carried", f"{node}.{port}"


def _name(value: Input) -> str:
    """``node.port``, also the value's first handle; values of earlier steps have names of their own."""
    return f"{value.source}@-{value.lag}:{value.init:g}" if value.lag else str(value.source)


@lru_cache(maxsize=65536)
def _covers(have: Layout, want: Layout, rows: int) -> bool:
    """Whether every device has what it wants, in the very boxes that it wants."""
    boxes = have.boxes((rows,))
    return all(boxes.get(device) == box for device, box in want.boxes((rows,)).items())
