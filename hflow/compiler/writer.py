"""Writing a program: values get handles, edges are lowered, instructions are put in order."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hflow.compiler.draft import Draft
from hflow.compiler.layout import Box, Layout
from hflow.compiler.lowering import data_edge
from hflow.compiler.plan import EdgePlan, Instruction
from hflow.compiler.ports import input_layout, output_layout
from hflow.graph.graph import Graph, Input, Node

Place = tuple[str, tuple[tuple[int, Box], ...]]


@dataclass
class Writer:
    """The program so far. `at` maps a value and the boxes in which it lies to its handle."""

    draft: Draft
    graph: Graph
    edges: list[EdgePlan] = field(default_factory=list[EdgePlan])
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    at: dict[Place, str] = field(default_factory=dict[Place, str])

    def find(self, value: str, layout: Layout, rows: int) -> str | None:
        """The handle of `value` if some handle has it on all devices of `layout`, in these very boxes."""
        wanted = layout.boxes((rows,)).items()
        return next(
            (handle for (name, boxes), handle in self.at.items() if name == value and wanted <= set(boxes)),
            None,
        )

    def put(self, value: str, layout: Layout, rows: int, handle: str) -> None:
        self.at[value, tuple(layout.boxes((rows,)).items())] = handle

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
            assert layout
            names = dict.fromkeys(map(value_name, values))
            missing = {name: f"{name}@{node.name}" for name in names if not self.find(name, layout, rows)}
            if missing:
                self._transfer(edge, {value_name(v): v.source.port for v in values}, missing)
            for name, handle in missing.items():
                self.put(name, layout, rows, handle)
            handles |= {v.port: self.find(value_name(v), layout, rows) or "" for v in values}
        return handles

    def call(self, node: Node, inputs: dict[str, str]) -> None:
        mesh = self.draft.node_plan(node.name).mesh
        outputs = self.write_outputs(node)
        self.instructions.append(Instruction("call", node.name, mesh.devices, inputs, outputs))

    def write_outputs(self, node: Node) -> dict[str, str]:
        """Handles, by port, for what a node makes."""
        mesh = self.draft.node_plan(node.name).mesh
        outputs = {o.port: f"{node.name}.{o.port}" for o in node.outputs}
        for output in node.outputs:
            layout = output_layout(node, mesh, output.type)
            self.put(outputs[output.port], layout, output.type.rows, outputs[output.port])
        return outputs

    @contextmanager
    def body(self) -> Generator[list[Instruction]]:
        """Instructions written inside go to the yielded list: the body of a loop."""
        outer, self.instructions = self.instructions, []
        yield self.instructions
        self.instructions = outer

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

    def _edge(self, node: Node, values: list[Input]) -> EdgePlan:
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
            lag, init = values[0].lag, values[0].init
            self.instructions.append(
                Instruction("recall", producer.name, mesh.devices, outputs=outputs, lag=lag, init=init)
            )

    def _transfer(self, edge: EdgePlan, ports: dict[str, str], missing: dict[str, str]) -> None:
        """`inputs` and `outputs` map the moved ports to handles at the source and at the target."""
        inputs = {ports[name]: name for name in missing}
        outputs = {ports[name]: handle for name, handle in missing.items()}
        devices = tuple(sorted({*edge.source_mesh.devices, *edge.target_mesh.devices}))
        number = len(self.edges) - 1
        self.instructions.append(Instruction("transfer", edge.target, devices, inputs, outputs, number))


def value_name(value: Input) -> str:
    """``node.port``, also the value's first handle; values of earlier steps have names of their own."""
    return f"{value.source}@-{value.lag}:{value.init:g}" if value.lag else str(value.source)


def finished(instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """A list of instructions with frees and dependencies filled in."""
    return _with_dependencies(_with_frees(instructions))


def _with_frees(instructions: list[Instruction]) -> list[Instruction]:
    """After the last use of a handle, an instruction that drops it."""
    last: dict[str, int] = {}
    for number, instruction in enumerate(instructions):
        for handle in (*instruction.inputs.values(), *instruction.outputs.values()):
            last[handle] = number
    out: list[Instruction] = []
    for number, instruction in enumerate(instructions):
        out.append(instruction)
        dead = sorted(handle for handle, at in last.items() if at == number)
        if dead:
            out.append(Instruction("free", instruction.target, instruction.devices, dict(zip(dead, dead))))
    return out


def _with_dependencies(instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """Fill in `after`: the instructions that write what this one reads."""
    writers: dict[str, int] = {}
    out: list[Instruction] = []
    for number, instruction in enumerate(instructions):
        after = {writers[h] for h in instruction.inputs.values() if h in writers}
        out.append(replace(instruction, after=tuple(sorted(after))))
        writers.update(dict.fromkeys(instruction.outputs.values(), number))
    return tuple(out)
