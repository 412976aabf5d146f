"""Lower every edge and write the program: what each worker does, in an order all of them share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import networkx as nx

from hflow.compiler.draft import Draft
from hflow.compiler.layout import Box, Layout
from hflow.compiler.lowering import data_edge, weight_edge
from hflow.compiler.plan import EdgePlan, Instruction, Program
from hflow.compiler.ports import input_layout, output_layout
from hflow.graph.graph import Graph, Input, Node, Ref


def lower_edges(draft: Draft) -> Draft:
    evaluation = draft.evaluation_graph
    return replace(
        draft,
        step=_program(draft, draft.graph),
        evaluation=_program(draft, evaluation) if evaluation else None,
    )


def node_order(graph: Graph) -> tuple[Node, ...]:
    """Topological order in which a model is read in a step before it is trained."""
    dag = graph.dag()
    for reader in (n for n in graph.nodes if n.model and n.op != "train"):
        assert reader.model
        dag.add_edges_from((reader.name, trainer.name) for trainer in graph.trainers(reader.model.model))
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return tuple(map(graph.node, nx.lexicographical_topological_sort(dag, key=position.__getitem__)))


Place = tuple[str, tuple[tuple[int, Box], ...]]


@dataclass
class _Writer:
    """The program so far. `at` maps a value and the boxes in which it lies to its handle."""

    draft: Draft
    graph: Graph
    edges: list[EdgePlan] = field(default_factory=list[EdgePlan])
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    at: dict[Place, str] = field(default_factory=dict[Place, str])

    def find(self, value: Ref, layout: Layout, rows: int) -> str | None:
        """The handle of `value` if some handle has it on all devices of `layout`, in these very boxes."""
        wanted = layout.boxes((rows,)).items()
        return next(
            (
                handle
                for (name, boxes), handle in self.at.items()
                if name == str(value) and wanted <= set(boxes)
            ),
            None,
        )

    def put(self, value: Ref, layout: Layout, rows: int, handle: str) -> None:
        self.at[str(value), tuple(layout.boxes((rows,)).items())] = handle


def _program(draft: Draft, graph: Graph) -> Program:
    writer = _Writer(draft, graph)
    for node in node_order(graph):
        _read_weights(writer, node)
        _call(writer, node, _read_inputs(writer, node))
    return Program(graph, tuple(writer.edges), _with_dependencies(_with_frees(writer.instructions)))


def _read_weights(writer: _Writer, node: Node) -> None:
    draft = writer.draft
    for edge in (e for e in draft.weight_edges if e.reader == node.name):
        source, target = draft.node_plan(edge.trainer), draft.node_plan(edge.reader)
        dtype = draft.graph.model(edge.model).dtype
        name = f"{edge.model} => {edge.reader}"
        ends = (edge.trainer, source.mesh), (edge.reader, target.mesh)
        writer.edges.append(weight_edge(name, dtype, draft.shapes[edge.model], *ends, draft.cluster))
        if source.mesh == target.mesh:
            continue  # the reader runs on the trainer's own weights
        devices = tuple(sorted({*source.mesh.devices, *target.mesh.devices}))
        number = len(writer.edges) - 1
        writer.instructions.append(Instruction("weights", node.name, devices, edge=number))


def _read_inputs(writer: _Writer, node: Node) -> dict[str, str]:
    """One lowered edge per producer; a transfer where its values do not lie as `node` reads them."""
    handles: dict[str, str] = {}
    for values in _by_producer(node):
        edge = _edge(writer, node, values)
        writer.edges.append(edge)
        layout, rows = edge.target_layout, values[0].type.rows
        assert layout
        missing = {
            v.source: f"{v.source}@{node.name}" for v in values if not writer.find(v.source, layout, rows)
        }
        if missing:
            writer.instructions.append(_transfer(edge, len(writer.edges) - 1, missing))
        for source, handle in missing.items():
            writer.put(source, layout, rows, handle)
        handles |= {v.port: writer.find(v.source, layout, rows) or "" for v in values}
    return handles


def _by_producer(node: Node) -> list[list[Input]]:
    """The node's inputs in groups that move as one: same producer, same number of rows."""
    groups: dict[tuple[str, int], list[Input]] = {}
    for value in node.inputs:
        groups.setdefault((value.source.node, value.type.rows), []).append(value)
    return list(groups.values())


def _edge(writer: _Writer, node: Node, values: list[Input]) -> EdgePlan:
    draft, producer = writer.draft, writer.graph.node(values[0].source.node)
    by_port = {v.source.port: v.type for v in values}
    source = output_layout(producer, draft.node_plan(producer.name).mesh, values[0].type)
    target = input_layout(draft.node_plan(node.name).mesh, values[0].type)
    name = f"{producer.name}.{','.join(by_port)} -> {node.name}"
    ends = (producer.name, source), (node.name, target)
    return data_edge(name, tuple(by_port), tuple(by_port.values()), *ends, draft.cluster)


def _transfer(edge: EdgePlan, number: int, missing: dict[Ref, str]) -> Instruction:
    """`inputs` and `outputs` map the moved ports to handles at the source and at the target."""
    inputs = {ref.port: str(ref) for ref in missing}
    outputs = {ref.port: handle for ref, handle in missing.items()}
    devices = tuple(sorted({*edge.source_mesh.devices, *edge.target_mesh.devices}))
    return Instruction("transfer", edge.target, devices, inputs, outputs, number)


def _call(writer: _Writer, node: Node, inputs: dict[str, str]) -> None:
    mesh = writer.draft.node_plan(node.name).mesh
    outputs = {o.port: f"{node.name}.{o.port}" for o in node.outputs}
    for output in node.outputs:
        ref, layout = Ref(node.name, output.port), output_layout(node, mesh, output.type)
        writer.put(ref, layout, output.type.rows, str(ref))
    writer.instructions.append(Instruction("call", node.name, mesh.devices, inputs, outputs))


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
