"""How much a node has to do in one step: rows and token counts, read from its typed ports."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.graph.graph import Node
from hflow.graph.types import ValueType


@dataclass(frozen=True)
class Workload:
    """`rows` sequences of `prompt` + `response` tokens (the greatest lengths that the types admit).

    `samples`: sequences that share one prompt; `optimizer_steps`: updates per step of a train node,
    each over `rows_per_update` rows.
    """

    rows: int
    prompt: int
    response: int
    samples: int = 1
    optimizer_steps: int = 0
    rows_per_update: int = 0

    @property
    def sequence(self) -> int:
        return self.prompt + self.response


def workload(node: Node) -> Workload:
    """The workload of a generate, score or train node."""
    if node.op == "generate":
        prompt = node.input("prompt")
        assert prompt
        rows = _output(node, "tokens").rows
        longest = _ragged_size(prompt.type)
        return Workload(rows, longest, node.options["max_new_tokens"], node.options["n"])
    tokens, mask = node.input("tokens"), node.input("mask")
    assert tokens and mask
    rows, response = tokens.type.rows, _ragged_size(mask.type)
    prompt_length = _ragged_size(tokens.type) - response
    if node.op != "train":
        return Workload(rows, prompt_length, response)
    assert node.repeat
    size = node.repeat.minibatch or rows
    return Workload(rows, prompt_length, response, 1, node.repeat.epochs * (rows // size), size)


def _output(node: Node, port: str) -> ValueType:
    found = node.output(port)
    assert found
    return found.type


def _ragged_size(type_: ValueType) -> int:
    size = next((d.size for d in type_.dims if d.ragged), None)
    assert size is not None, f"{type_} has no greatest length"
    return size
