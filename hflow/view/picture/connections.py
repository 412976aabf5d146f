"""What the lines of a graph's picture stand for: values, orders, and what goes back to the next step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hflow.graph.ir import Graph, Input, Model, Node
from hflow.view import words
from hflow.view.picture.ordering import GraphLink


@dataclass(frozen=True)
class Connection:
    """A line from left to right: `inputs` of the link's target that come over it, or, without any, an order.

    A value that is wired by type has a line of its own only where no other value comes from its producer.
    """

    link: GraphLink
    inputs: tuple[Input, ...]

    @property
    def derived(self) -> bool:
        return bool(self.inputs) and self.inputs[0].derived


@dataclass(frozen=True)
class Feedback:
    """What a step leaves to later ones: the weights of `model`, or else the scalar `port` of `source`."""

    source: str
    targets: tuple[str, ...]
    label: str
    model: str | None = None
    port: str = ""

    @property
    def own(self) -> bool:
        """Whether a node reads what it made itself."""
        return self.targets == (self.source,)


def connections(graph: Graph) -> tuple[Connection, ...]:
    return tuple(c for node in graph.nodes for c in (*_values(node), *_orders(node)))


def _values(node: Node) -> Iterator[Connection]:
    within_step = [i for i in node.inputs if i.lag == 0]
    written = {i.source.node: i.source for i in reversed(within_step) if not i.derived}
    lines: dict[str, list[Input]] = {}
    for value in sorted(within_step, key=lambda i: i.derived):
        line = written.get(value.source.node, value.source) if value.derived else value.source
        lines.setdefault(str(line), []).append(value)
    for values in lines.values():
        source = values[0].source
        yield Connection(GraphLink(source.node, node.name, source.port), tuple(values))


def _orders(node: Node) -> Iterator[Connection]:
    read = {i.source.node for i in node.inputs if i.lag == 0}
    return (Connection(GraphLink(first, node.name), ()) for first in node.after if first not in read)


def feedbacks(graph: Graph) -> tuple[Feedback, ...]:
    return (*(f for m in graph.models for f in _weights(graph, m)), *_carried(graph))


def _weights(graph: Graph, model: Model) -> Iterator[Feedback]:
    """From the last node that trains a model (or the one it takes over) to those that read it, by age."""
    trained = model.refresh.model if model.refresh else model.name
    readers: dict[int, list[str]] = {}
    for node in graph.nodes:
        if node.model and node.model.model == model.name and node.op != "train" and not node.model.base:
            readers.setdefault(node.model.lag, []).append(node.name)
    for trainer in graph.trainers(trained)[-1:]:
        for lag, names in readers.items():
            to = f"to {model.name} " if model.refresh else ""
            label = f"{trained} weights, {to}{words.age(model, lag) or 'next step'}"
            yield Feedback(trainer.name, tuple(names), label, trained)


def _carried(graph: Graph) -> Iterator[Feedback]:
    for node, value in graph.edges():
        if value.lag:
            named = "" if value.source.node == node.name else f"{value.source}, "
            label = named + words.carried(value)
            yield Feedback(value.source.node, (node.name,), label, port=value.source.port)
