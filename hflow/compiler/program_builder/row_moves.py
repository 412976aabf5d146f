"""Rows of a step: where the values of each node lie, and the transfers that bring them to their readers."""

from __future__ import annotations

from functools import lru_cache

from hflow.compiler.program_builder.input_moves import InputMove
from hflow.compiler.program_builder.script import Key
from hflow.compiler.program_builder.unfinished import UnfinishedProgram
from hflow.graph.ir import Node
from hflow.plan.layout import Layout
from hflow.plan.ports import output_layout
from hflow.plan.program import Carry, Recall, Transfer


class RowMoves:
    """Values get handles; one that lies in several layouts has a handle for each."""

    def __init__(self, program: UnfinishedProgram):
        self.program = program
        self._at: dict[str, list[tuple[str, Layout]]] = {}

    def read(self, node: Node) -> dict[str, str]:
        """Bring a node's inputs to where it reads them, by transfers where they do not lie so already; their
        handles by port."""
        handles: dict[str, str] = {}
        for move in self.program.inputs.of(node, self.program.plans):
            self.program.edges.append(move.edge)
            if move.lag:
                self._recall(move)
            layout = move.edge.target_layout
            found = {name: self._find(name, layout, move.rows) for name in move.names}
            missing = {name: f"{name}@{node.name}" for name, handle in found.items() if handle is None}
            if missing:
                self._transfer(move, missing)
            for name, handle in missing.items():
                self._put(name, layout, handle)
            handles |= {port: found[name] or missing[name] for port, name in move.reads}
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

    def _recall(self, move: InputMove) -> None:
        """Values of earlier steps enter the store once, in the layout in which their producer made them."""
        layout, producer = move.edge.source_layout, move.edge.source
        new = [name for name in move.names if not self._find(name, layout, move.rows)]
        for name in new:
            self._put(name, layout, name)
        if new:
            outputs = {move.names[name]: name for name in new}
            recall = Recall(producer, layout.mesh.devices, outputs, move.lag, move.init)
            self.program.script.add(recall, {_carried(producer, port) for port in outputs})

    def _transfer(self, move: InputMove, missing: dict[str, str]) -> None:
        """`missing`: of the values that move, the handle at the target."""
        edge = move.edge
        inputs = {move.names[name]: name for name in missing}
        outputs = {move.names[name]: handle for name, handle in missing.items()}
        number, seconds = len(self.program.edges) - 1, edge.time_s(inputs, self.program.draft.cluster)
        transfer = Transfer(edge.target, edge.devices, number, inputs, outputs, time_s=seconds)
        self.program.script.add(transfer)


def _carried(node: str, port: str) -> Key:
    """What is remembered of a value from one step to the next."""
    return "carried", f"{node}.{port}"


@lru_cache(maxsize=65536)
def _covers(have: Layout, want: Layout, rows: int) -> bool:
    """Whether every device has what it wants, in the very boxes that it wants."""
    boxes = have.boxes((rows,))
    return all(boxes.get(device) == box for device, box in want.boxes((rows,)).items())
