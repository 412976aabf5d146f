"""Do the rows of a data node fit into the positions of the models that read them? Asked before any step; of
rows that are streamed, when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hflow.diagnostics import HflowError
from hflow.graph.infer.regions import maker
from hflow.graph.ir import Node
from hflow.plan.plan import Plan
from hflow.runtime.data_files import refused
from hflow.runtime.engines.python.examples import Example


def check_positions(plan: Plan, data: Node, rows: Sequence[Example], where: Callable[[int], str]) -> None:
    """Raises HflowError HF403 for a row whose prompt, with its response or the new tokens that a rollout may
    sample after it, is longer than a model that reads them has positions.

    `where` says where the row of a number is. How long conversations of several turns become is known when
    they are made.
    """
    graph = next(p.graph for p in plan.programs if any(n.name == data.name for n in p.graph.nodes))
    for node in (n for n in graph.nodes if n.model and _reads(n, data)):
        have = plan.shapes[node.model_use.model].max_positions
        new = node.options["max_new_tokens"] if node.op == "generate" else 0
        longest = max(rows, key=lambda row: _length(row, node.op), default=None)
        if longest is not None and _length(longest, node.op) + new > have:
            raise _too_long(where(longest.number), node, longest, new, have)


def _reads(node: Node, data: Node) -> bool:
    tokens = node.input("prompt") or node.input("tokens")
    origin = tokens.type.dims[-1].factors[0].origin if tokens else None
    return origin is not None and maker(origin) == data.name


def _length(row: Example, op: str) -> int:
    """Tokens that a node of kind `op` reads of the row."""
    return len(row.prompt) + (0 if op == "generate" else max(map(len, row.responses), default=0))


def _too_long(where: str, node: Node, row: Example, new: int, have: int) -> HflowError:
    read = _length(row, node.op)
    needs = f"{read} tokens and up to {new} new ones" if new else f"{read} tokens"
    message = f"{where} needs {read + new} positions in `{node.name}`"
    message += f" ({needs}); model `{node.model_use.model}` has {have}"
    lengths = "`max_new_tokens`" if new else "`max_response_tokens`"
    return refused(message, f"a smaller `max_prompt_tokens` leaves such rows out; or a smaller {lengths}")
