"""A program as text: meshes, then one line per instruction with the types of what it makes, in the order in
which every worker walks through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hflow import units
from hflow.graph.types import ValueType
from hflow.plan.edges import EdgePlan
from hflow.plan.layout import Layout, Mesh, Shard
from hflow.plan.node_plan import NodePlan
from hflow.plan.ports import output_layout
from hflow.plan.program import Instruction, Program
from hflow.plan.workload import rounds
from hflow.view import words

Line = tuple[str, tuple[str, ...]]  # what is done, and the types of what it makes
MIDDLE, WIDEST = 64, 120  # columns: types stand right of the former, but below where a line became too wide


def program_text(program: Program, nodes: Sequence[NodePlan]) -> str:
    """The whole program.

    Args:
        nodes: the plans of all nodes of the program's graph.
    """
    return _Printer(program, nodes).text()


class _Printer:
    """Meshes are named in the order in which they occur: a, b, ..., z, m26, ..."""

    def __init__(self, program: Program, nodes: Sequence[NodePlan]) -> None:
        self.program = program
        self.graph = program.graph
        names = {node.name for node in self.graph.nodes}
        self.plans = {n.node: n for n in nodes if n.node in names}
        meshes = dict.fromkeys(n.mesh for n in self.plans.values())
        self.meshes: Mapping[Mesh, str] = {mesh: _name(i) for i, mesh in enumerate(meshes)}

    def text(self) -> str:
        lines = [line for i in self.program.instructions for line in self._lines(i, "  ")]
        width = max((len(done) for done, types in lines if types and len(done) <= MIDDLE), default=0)
        params = ", ".join(f"{name}={value}" for name, value in self.graph.params.items())
        head = [f"graph {self.graph.name}({params})", *self._meshes()]
        return "\n".join([*head, *(_joined(done, types, width) for done, types in lines)]) + "\n"

    def _meshes(self) -> Iterator[str]:
        for mesh, name in self.meshes.items():
            sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.axes if size > 1) or "dp=1"
            devices = str(mesh).partition("@")[2]
            yield f"  mesh {name}[{sizes}] = device {devices}"

    def _lines(self, i: Instruction, indent: str) -> Iterator[Line]:
        if i.op == "loop":
            yield from self._loop(i, indent)
        elif i.op == "free":
            yield f"{indent}free {', '.join(f'%{handle}' for handle in i.inputs.values())}", ()
        elif i.op == "call":
            yield self._call(i, indent)
        elif i.op == "await":
            yield f"{indent}{_results(i)}await {i.target}", self._made(i)
        elif i.edge is not None:
            yield self._move(i, self.program.edges[i.edge], indent)
        else:
            yield self._keep(i, indent)

    def _loop(self, loop: Instruction, indent: str) -> Iterator[Line]:
        region = self.graph.region(loop.target)
        least = units.plural(rounds(self.graph, self.graph.node(loop.target)), "round")
        what = f"{_results(loop)}loop {loop.target}, {words.rule(region)}, at least {least}"
        yield f"{indent}{what}{_time(loop)}", ()
        yield from (line for inner in loop.body for line in self._lines(inner, f"{indent}  "))

    def _call(self, i: Instruction, indent: str) -> Line:
        node, plan = self.graph.node(i.target), self.plans[i.target]
        model = [node.model.model] if node.model else []
        reads = ", ".join(f"%{handle}" for handle in dict.fromkeys(i.inputs.values()))
        verb = node.op if i.outputs else f"{node.op} {node.name}:"  # else its results tell the name
        done = f"{indent}{_results(i)}{' '.join([verb, *model, reads])}".rstrip()
        marks = "".join(f" {mark}" for mark in plan.strategy.marks)
        return f"{done} @{self.meshes[plan.mesh]}{marks}{_time(i)}", self._made(i)

    def _made(self, i: Instruction) -> tuple[str, ...]:
        node, mesh = self.graph.node(i.target), self.plans[i.target].mesh
        made = (o for o in node.outputs if o.port in i.outputs)
        return tuple(placed(o.type, output_layout(node, mesh, o.type)) for o in made)

    def _move(self, i: Instruction, edge: EdgePlan, indent: str) -> Line:
        where = f"@{self._mesh(edge.source_mesh)} -> @{self._mesh(edge.target_mesh)}  {edge.collective}"
        if i.op == "weights":
            every = f", every {i.every} steps" if i.every else ""
            lends = ", lends its memory" if i.lends else ""
            return f"{indent}weights {edge.name} {where}{every}{lends}{_time(i)}", ()
        reads = ", ".join(f"%{handle}" for handle in i.inputs.values())
        types = dict(zip(edge.ports, edge.types))
        layout = edge.target_layout
        made = tuple(placed(types[port], layout) for port in i.outputs if port in types and layout)
        return f"{indent}{_results(i)}reshard {reads} {where}{_time(i)}", made

    def _keep(self, i: Instruction, indent: str) -> Line:
        """Of one node: its state in the host's memory, its copy of weights, values that last."""
        values = "".join(f" %{handle}" for handle in i.inputs.values())
        age = f" lag {i.lag}" if i.lag else ""
        lends = ", memory back to the trainer" if i.lends else ""
        return f"{indent}{_results(i)}{i.op} {i.target}{values}{age}{lends}{_time(i)}", ()

    def _mesh(self, mesh: Mesh) -> str:
        return self.meshes.get(mesh) or f"[{mesh}]"


def _joined(done: str, types: tuple[str, ...], width: int) -> str:
    line = f"{done:<{width}} : {', '.join(types)}" if types else done
    if len(line) <= WIDEST or not types:
        return line
    indent = " " * (len(done) - len(done.lstrip()) + 4)
    return "\n".join([done, *(f"{indent}: {type_}" for type_ in types)])


def placed(value: ValueType, layout: Layout) -> str:
    """A type with the axes that split its rows: ``f32[batch{dp}, resp~]``."""
    axes = [
        axis
        for (axis, size), p in zip(layout.mesh.axes, layout.placements)
        if isinstance(p, Shard) and size > 1
    ]
    if not axes:
        return str(value)
    first, *rest = map(str, value.dims)
    dims = ", ".join([f"{first}{{{','.join(axes)}}}", *rest])
    return f"{value.dtype}[{dims}]{value.provenance or ''}"


def _results(i: Instruction) -> str:
    made = ", ".join(f"%{handle}" for handle in i.outputs.values())
    return f"{made} = " if made else ""


def _time(i: Instruction) -> str:
    return f"  {units.seconds(i.time_s)}" if i.time_s else ""


def _name(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"m{number}"
