"""`call`: a Python function on the rows of its inputs. Ports and most options are those of the function."""

from __future__ import annotations

from hflow.graph.infer.functions import FunctionSource
from hflow.graph.ir import Node
from hflow.graph.options import Option

TIMEOUT = "timeout_s"
OPTIONS = (Option(TIMEOUT, "float", above=0, optional=True),)


def function_problem(source: FunctionSource) -> str | None:
    """Why a `call` node cannot have a function, or None."""
    if any(p.tag == "trained" for p in source.signature.inputs):
        return "only a train node computes `<trained>` inputs"
    if clash := sorted({o.name for o in OPTIONS} & {o.name for o in source.options}):
        return f"its option `{clash[0]}` is one of the call node itself"
    return None


def has_own_limit(node: Node) -> bool:
    """Whether the option is the node's. Graphs from before it may have a function with one of this name."""
    return node.op == "call" and node.function is not None and TIMEOUT not in node.function.options


def time_limit_s(node: Node) -> float | None:
    """After which the node's function is ended; None where it may take as long as it does."""
    return node.options.get(TIMEOUT) if has_own_limit(node) else None
