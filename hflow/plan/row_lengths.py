"""How long the rows of a node are: what is stated of the nodes that made them.

The dims of a node's tokens and mask say which node made the prompts and responses, through calls and regions.
Of a later turn, whose prompt is all that came before, and of rows of a data node with responses, nothing is
known: they count at the greatest.
"""

from __future__ import annotations

from dataclasses import dataclass

from hflow.graph.infer.regions import maker
from hflow.graph.ir import Graph, Node
from hflow.graph.lengths import Lengths


@dataclass(frozen=True)
class RowLengths:
    """None: nothing is stated, and all count at the greatest length."""

    prompts: Lengths | None = None
    responses: Lengths | None = None


UNSTATED = RowLengths()


def row_lengths(graph: Graph, node: Node) -> RowLengths:
    """Of the rows of a generate, score or train node."""
    if not any(other.lengths for other in graph.nodes):
        return UNSTATED
    made_by = node if node.op == "generate" else _maker(graph, node, "mask")
    if made_by is None or made_by.op != "generate":
        return UNSTATED
    if made_by.input("prompt"):
        source = _maker(graph, made_by, "prompt")
        return RowLengths(source.lengths if source else None, made_by.lengths)
    return RowLengths(None, made_by.lengths) if made_by is node else UNSTATED


def counted_at_greatest(graph: Graph) -> dict[str, list[str]]:
    """Where some lengths are stated, the nodes with a model whose `prompts`, `responses` or whole `rows`
    count at the greatest all the same, by these words."""
    found: dict[str, list[str]] = {}
    for node in (node for node in graph.nodes if node.model and any(n.lengths for n in graph.nodes)):
        lengths = row_lengths(graph, node)
        missing = [name for name in ("prompts", "responses") if not getattr(lengths, name)]
        if missing:
            found.setdefault("rows" if len(missing) == 2 else missing[0], []).append(node.name)
    return found


def _maker(graph: Graph, node: Node, port: str) -> Node | None:
    """The node that made the texts which a node reads or makes at `port`."""
    if all(value.port != port for value in (*node.inputs, *node.outputs)):
        return None
    origin = node.type_of(port).dims[-1].factors[0].origin
    return next((other for other in graph.nodes if origin and other.name == maker(origin)), None)
