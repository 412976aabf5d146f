"""Which lengths the texts have that a data or generate node has just made on this worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hflow.graph.ir import Node
from hflow.runtime.rows import Rows


def text_lengths(node: Node, outputs: Mapping[str, Rows]) -> Counter[int]:
    """How many prompts of a data node, or responses of the first turn of a generate node, there are of each
    length; none of other nodes, nor of a data node whose prompts stand before responses."""
    port = _port(node)
    return Counter(outputs[port].row_lengths.tolist()) if port in outputs else Counter()


def _port(node: Node) -> str:
    """Where the lengths of the texts are those of rows; empty where they are nowhere."""
    if node.op == "generate" and node.input("prompt"):
        return "mask"
    columns = node.outputs if node.op == "data" else ()
    of_prompts = (o.port for o in columns if o.type.ragged and o.type.dims[-1].factors[0].name == "prompt")
    return next(of_prompts, "")
