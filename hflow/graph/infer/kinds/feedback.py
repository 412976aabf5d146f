"""What a data node may read of earlier steps, to draw rows by how often responses to them were right."""

from __future__ import annotations

from hflow.graph.ir import Node, Ref
from hflow.graph.types import ValueType


def problem(source: Ref, type_: ValueType, node: Node) -> tuple[str, str, str] | None:
    """Why `source`, of `type_`, cannot say of each row of a data node whether it was a success: code, message
    and help; or None.

    It has the rows of the data node in their order, or a group of rows for each of them.
    """
    rows = node.outputs[0].type.dims[0]
    if type_.dtype not in ("f32", "bool") or len(type_.dims) != 1 or type_.dims[0].ragged:
        message = f"a curriculum reads `f32[rows]` or `bool[rows]`, but `{source}` is `{type_}`"
        return "HF208", message, "one value for each response, like the `score` of a reward"
    if type_.dims[0].factors[:1] != rows.factors[:1]:
        message = f"`{source}` is `{type_}`, of other rows than those that `{node.name}` draws"
        return "HF209", message, "read a value of what was made of these rows"
    if type_.dtype == "bool" and "threshold" in node.options["curriculum"]:
        message = f"`threshold` has no effect: `{source}` is `{type_}`"
        return "HF212", message, "true is a success"
    return None
