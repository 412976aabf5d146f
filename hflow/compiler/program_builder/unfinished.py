"""What the parts of the builder share: a program that is being built."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from hflow.compiler.lowering import UnloweredEdge
from hflow.compiler.program_builder.input_moves import InputMoves
from hflow.compiler.program_builder.script import Script
from hflow.compiler.state import Draft
from hflow.graph.ir import Graph, Node
from hflow.plan.node_plan import NodePlan
from hflow.plan.replicas import Instance, instance_of


@dataclass
class UnfinishedProgram:
    """The program of `graph`, as far as it is built.

    Attributes:
        order: of the graph's nodes in the program.
        inputs: what comes to each node.
        plans: of its nodes.
        edges: those that instructions name by number.
        script: where instructions are added; inside a loop, its body.
    """

    draft: Draft
    graph: Graph
    order: tuple[Node, ...]
    inputs: InputMoves
    plans: Mapping[str, NodePlan]
    edges: list[UnloweredEdge] = field(default_factory=list[UnloweredEdge])
    script: Script = field(default_factory=Script)

    def instance(self, node: Node) -> Instance:
        """The weights that a node with a model uses."""
        return instance_of(node, self.plans[node.name].sharding)

    def users(self) -> list[tuple[Node, Instance]]:
        """The nodes with models, in the program's order, with the weights that each uses."""
        return [(node, self.instance(node)) for node in self.order if node.model]

    @contextmanager
    def body(self) -> Generator[Script]:
        """Instructions that are added inside go to the yielded script: the body of a loop."""
        outer, self.script = self.script, Script()
        yield self.script
        self.script = outer
