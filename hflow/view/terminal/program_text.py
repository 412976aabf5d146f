"""A program as text: meshes, then one line per instruction with the types of what it makes, in the order in
which every worker walks through them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

from hflow import units
from hflow.graph.types import ValueType
from hflow.plan.edges import Edge
from hflow.plan.layout import Layout, Mesh, num_parts
from hflow.plan.node_plan import NodePlan
from hflow.plan.ports import output_layout
from hflow.plan.program import (
    Activity,
    Await,
    Call,
    Carry,
    Free,
    Instruction,
    Loop,
    Offload,
    Onload,
    Program,
    Recall,
    Release,
    SyncWeights,
    Timed,
    Timeless,
    Transfer,
)
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
        if isinstance(i, Loop):
            yield f"{indent}{self._loop(i)}", ()
            yield from (line for inner in i.body for line in self._lines(inner, f"{indent}  "))
            return
        done, made = self._line(i)
        yield f"{indent}{done}", made

    def _line(self, i: Activity | Timeless) -> Line:
        match i:
            case Call():
                return self._call(i)
            case Await():
                return f"{_results(i.outputs)}await {i.node}", self._made(i)
            case Transfer():
                return self._transfer(i)
            case SyncWeights():
                return self._sync(i), ()
            case Onload() | Offload():
                return f"{i.op} {i.node}{_time(i)}", ()
            case Release():
                return f"release {i.node}{', memory back to the trainer' if i.donates else ''}", ()
            case Carry():
                return f"carry {i.node} {_handles(i.inputs.values(), ' ')} lag {i.lag}", ()
            case Recall():
                return f"{_results(i.outputs)}recall {i.node} lag {i.lag}", ()
            case Free():
                return f"free {_handles(i.handles)}", ()
            case _:
                assert_never(i)

    def _loop(self, loop: Loop) -> str:
        region = self.graph.region(loop.node)
        least = units.plural(rounds(self.graph, self.graph.node(loop.node)), "round")
        return (
            f"{_results(loop.outputs)}loop {loop.node}, {words.rule(region)}, at least {least}{_time(loop)}"
        )

    def _call(self, i: Call) -> Line:
        node, plan = self.graph.node(i.node), self.plans[i.node]
        model = [node.model.model] if node.model else []
        reads = _handles(dict.fromkeys(i.inputs.values()))
        verb = node.op if i.outputs else f"{node.op} {node.name}:"  # else its results tell the name
        done = f"{_results(i.outputs)}{' '.join([verb, *model, reads])}".rstrip()
        marks = "".join(f" {mark}" for mark in plan.strategy.marks)
        return f"{done} @{self.meshes[plan.mesh]}{marks}{_time(i)}", self._made(i)

    def _made(self, i: Call | Await) -> tuple[str, ...]:
        node, mesh = self.graph.node(i.node), self.plans[i.node].mesh
        made = (o for o in node.outputs if o.port in i.outputs)
        return tuple(placed(o.type, output_layout(node, mesh, o.type)) for o in made)

    def _transfer(self, i: Transfer) -> Line:
        edge = self.program.data_edge(i)
        types = dict(zip(edge.ports, edge.types))
        made = tuple(placed(types[port], edge.target_layout) for port in i.outputs if port in types)
        reads = _handles(i.inputs.values())
        return f"{_results(i.outputs)}reshard {reads} {self._ends(edge)}{_time(i)}", made

    def _sync(self, i: SyncWeights) -> str:
        edge = self.program.weight_edge(i)
        every = f", every {i.every} steps" if i.every else ""
        donates = ", donates its memory" if i.donates else ""
        changed = f", {words.changed(edge.changed)}" if edge.changed else ""
        return f"weights {edge.name} {self._ends(edge)}{every}{changed}{donates}{_time(i)}"

    def _ends(self, edge: Edge) -> str:
        return f"@{self._mesh(edge.source_mesh)} -> @{self._mesh(edge.target_mesh)}  {edge.collective}"

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
    axes = [axis for (axis, size), p in zip(layout.mesh.axes, layout.placements) if num_parts(p, size) > 1]
    if not axes:
        return str(value)
    first, *rest = map(str, value.dims)
    dims = ", ".join([f"{first}{{{','.join(axes)}}}", *rest])
    return f"{value.dtype}[{dims}]{value.provenance or ''}"


def _handles(handles: Iterable[str], between: str = ", ") -> str:
    return between.join(f"%{handle}" for handle in handles)


def _results(outputs: Mapping[str, str]) -> str:
    return f"{_handles(outputs.values())} = " if outputs else ""


def _time(i: Timed) -> str:
    return f"  {units.seconds(i.time_s)}" if i.time_s else ""


def _name(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"m{number}"
