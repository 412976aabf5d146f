"""`score`: what a model says about given texts, by one forward pass.

A model that predicts tokens gives the log-probs and the entropy of every response token; one with a
scalar head gives an estimate per response token (at the position that predicts it, so a value is
that before the token), and a score of the whole row (at its last token).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.signature import parse_signature
from hflow.graph.infer.unify import Bindings
from hflow.graph.ir import Head
from hflow.graph.options import Option, OptionProblem
from hflow.graph.types import Provenance, Role, ValueType

OPTIONS = (Option("temperature", "float", 1.0, above=0),)
_READS = "tokens: i32[rows, seq~], mask: bool[rows, resp~]"
SIGNATURES = {
    "lm": parse_signature(f"{_READS} -> logprobs: f32[rows, resp~], entropy: f32[rows, resp~]"),
    "scalar": parse_signature(f"{_READS} -> values: f32[rows, resp~], score: f32[rows]"),
}
INPUTS = SIGNATURES["lm"].inputs
_ROLES: dict[str, Role] = {"logprobs": "scored", "values": "value", "score": "score"}


def output_ports(head: Head) -> tuple[str, ...]:
    return tuple(p.name for p in SIGNATURES[head].outputs)


def head_of(port: str) -> Head | None:
    """The head that an output of a `score` node takes; None when neither has it."""
    heads: tuple[Head, ...] = ("lm", "scalar")
    return next((head for head in heads if port in output_ports(head)), None)


def option_problems(head: Head | None, written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    """HF212 for an option without effect."""
    if head == "scalar" and "temperature" in written:
        yield OptionProblem(
            "HF212", "`temperature` has no effect: a scalar head has no logits", "temperature"
        )


def outputs(draft: NodeDraft, bound: Bindings) -> dict[str, ValueType]:
    assert draft.model and draft.head
    made: dict[str, ValueType] = {}
    for port in SIGNATURES[draft.head].outputs:
        role = _ROLES.get(port.name)
        provenance = Provenance(draft.model.model, role, draft.model.lag) if role else None
        made[port.name] = replace(bound.apply(port.type), provenance=provenance)
    return made
