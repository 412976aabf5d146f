"""`score`: log-probs and entropy of given responses, by one forward pass."""

from __future__ import annotations

from dataclasses import replace

from hflow.graph.draft import Draft
from hflow.graph.options import Option
from hflow.graph.signature import parse_signature
from hflow.graph.types import Provenance, ValueType
from hflow.graph.unify import Bound

OPTIONS = (Option("temperature", "float", 1.0, above=0),)
SIGNATURE = parse_signature(
    "tokens: i32[rows, seq~], mask: bool[rows, resp~]"
    " -> logprobs: f32[rows, resp~], entropy: f32[rows, resp~]"
)


def outputs(draft: Draft, bound: Bound) -> dict[str, ValueType]:
    assert draft.model
    types = {p.name: bound.apply(p.type) for p in SIGNATURE.outputs}
    scored = Provenance(draft.model.model, "scored", draft.model.lag)
    return {**types, "logprobs": replace(types["logprobs"], provenance=scored)}
