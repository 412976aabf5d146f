"""What a `data` node hands on: the columns of the rows that it draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hflow.graph.ir import Output
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.engines.python.examples import Example
from hflow.runtime.rows import Rows, from_lists, from_strings


def drawn(call: EngineCall, batch: Sequence[Example], counts: Mapping[str, int]) -> Result:
    """This device's rows of a batch.

    Args:
        counts: of what is told of the whole batch, by metric; those that are 0 are not told.
    """
    rows = batch[call.first_row : call.first_row + call.num_rows]
    outputs = {output.port: _column(output, rows) for output in call.node.outputs}
    told = {name: (float(n), 1.0) for name, n in counts.items() if n}
    return Result(outputs, told | _learned(rows), numbers=torch.tensor([row.number for row in rows]))


def _learned(rows: Sequence[Example]) -> dict[str, tuple[float, float]]:
    """Of conversations with responses: the share of their tokens that are learned."""
    learned, total, marked = learned_tokens(rows)
    return {"learned_tokens": (float(learned), float(total))} if marked else {}


def learned_tokens(rows: Sequence[Example]) -> tuple[int, int, bool]:
    """Learned tokens, all tokens, and whether the rows say which are learned."""
    learned = sum(sum(mask) for row in rows for mask in row.masks)
    total = sum(len(row.prompt) + len(response) for row in rows for response in row.responses)
    return learned, total, any(row.masks for row in rows)


def _column(output: Output, rows: Sequence[Example]) -> Rows:
    """The values of one output port; which ones they are is told by its type. Each response has a row."""
    if output.type.dtype == "str":
        return from_strings([row.fields[output.port] for row in rows])
    if output.type.dtype == "f32":
        return Rows(torch.tensor([x for row in rows for x in row.numbers[output.port]], dtype=torch.float32))
    match str(output.type.dims[-1]):
        case "prompt~":
            return from_lists([row.prompt for row in rows])
        case "seq~":
            return from_lists([(*row.prompt, *response) for row in rows for response in row.responses])
        case "resp~":
            masks = [m for row in rows for m in row.masks or [[True] * len(r) for r in row.responses]]
            return from_lists(masks, torch.bool)
    raise AssertionError(f"a data node has no port of type {output.type}")
