"""What comes to a node: its inputs in groups that move as one, each over one edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hflow.compiler.lowering import UnloweredDataEdge
from hflow.graph.ir import Graph, Input, Node
from hflow.plan.layout import Layout, Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.ports import input_layout, output_layout

Ends = tuple[Layout, Layout]  # of an edge: where the values are made, and where they are read


@dataclass(frozen=True)
class InputMove:
    """Inputs of one node: of one producer and age, laid out alike at both ends.

    Attributes:
        names: of the values, each with the producer's port.
        reads: the node's ports, each with the name of its value.
        lag, init: how many steps ago the values were made, and what they are in the first steps.
    """

    edge: UnloweredDataEdge
    rows: int
    names: Mapping[str, str]
    reads: tuple[tuple[str, str], ...]
    lag: int
    init: float


class InputMoves:
    """Those of the nodes of one graph, kept by the meshes of their ends: many plans have the same."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._known: dict[tuple[str, tuple[Mesh, ...]], tuple[InputMove, ...]] = {}

    def of(self, node: Node, plans: Mapping[str, NodePlan]) -> tuple[InputMove, ...]:
        producers = [value.source.node for value in node.inputs]
        key = node.name, tuple(plans[name].mesh for name in (node.name, *producers))
        if key not in self._known:
            self._known[key] = self._moves(node, plans)
        return self._known[key]

    def _moves(self, node: Node, plans: Mapping[str, NodePlan]) -> tuple[InputMove, ...]:
        groups: dict[tuple[object, ...], tuple[Ends, list[Input]]] = {}
        for value in node.inputs:
            producer = self.graph.node(value.source.node)
            made = output_layout(producer, plans[producer.name].mesh, value.type)
            ends = made, input_layout(node, plans[node.name].mesh, value.type)
            key = (producer.name, value.lag, value.init, value.type.rows, *ends)
            groups.setdefault(key, (ends, []))[1].append(value)
        return tuple(_move(node, values, ends) for ends, values in groups.values())


def _move(node: Node, values: list[Input], ends: Ends) -> InputMove:
    producer, lag = values[0].source.node, values[0].lag
    by_port = {v.source.port: v.type for v in values}
    age = f"@-{lag}" if lag else ""
    name = f"{producer}.{','.join(by_port)}{age} -> {node.name}"
    edge = UnloweredDataEdge(name, producer, node.name, tuple(by_port), tuple(by_port.values()), *ends)
    names = {_name(v): v.source.port for v in values}
    reads = tuple((v.port, _name(v)) for v in values)
    return InputMove(edge, values[0].type.rows, names, reads, lag, values[0].init)


def _name(value: Input) -> str:
    """``node.port``, also the value's first handle; values of earlier steps have names of their own."""
    return f"{value.source}@-{value.lag}:{value.init:g}" if value.lag else str(value.source)
