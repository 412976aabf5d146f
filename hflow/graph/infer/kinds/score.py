"""`score`: what a model says about given texts, by one forward pass.

A model that predicts tokens gives the log-probs and the entropy of every response token; one with a
scalar head gives an estimate per response token (at the position that predicts it, so a value is
that before the token), and a score of the whole row (at its last token).

With `kept`, log-probs and entropy are of the distribution over the tokens among which a truncated sampler
chose. With `routes`, tokens pass through the experts that the sampler's routers chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.signature import Port, kept_port, parse_signature, routes_port
from hflow.graph.infer.unify import Bindings
from hflow.graph.ir import Head
from hflow.graph.options import Option, OptionProblem
from hflow.graph.types import PLAIN, Distribution, Role, ShapedProvenance, Truncation, ValueType

OPTIONS = (Option("temperature", "float", 1.0, above=0),)
_READS = "tokens: i32[rows, seq~], mask: bool[rows, resp~]"
SIGNATURES = {
    "lm": parse_signature(f"{_READS} -> logprobs: f32[rows, resp~], entropy: f32[rows, resp~]"),
    "scalar": parse_signature(f"{_READS} -> values: f32[rows, resp~], score: f32[rows]"),
}
INPUTS = SIGNATURES["lm"].inputs
_KEPT = kept_port(INPUTS[0].type.dims[0], optional=True)
_ROUTES = routes_port(INPUTS[0].type.dims[0])
_ROLES: dict[str, Role] = {"logprobs": "scored", "values": "value", "score": "score"}


def inputs(head: Head | None) -> tuple[Port, ...]:
    """A scalar head has no distribution that could be truncated, and no log-probs like a sampler's."""
    return INPUTS if head == "scalar" else (*INPUTS, _KEPT, _ROUTES)


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
    kept = bound.made_by.get("kept")
    truncation = kept.distribution.truncation if kept else Truncation()
    shape = Distribution(draft.options.get("temperature", 1.0), truncation)
    for port in SIGNATURES[draft.head].outputs:
        role = _ROLES.get(port.name)
        of = shape if role == "scored" else PLAIN
        provenance = ShapedProvenance.of(draft.model.weights, role, draft.model.lag, of) if role else None
        made[port.name] = replace(bound.apply(port.type), provenance=provenance)
    return made
