"""`generate`: samples `n` responses per prompt."""

from __future__ import annotations

from hflow.graph.draft import Draft
from hflow.graph.options import Option
from hflow.graph.signature import parse_ports
from hflow.graph.types import Dim, Factor, Provenance, ValueType
from hflow.graph.unify import Bound

OPTIONS = (
    Option("n", "int", 1, above=0),
    Option("max_new_tokens", "int", above=0),
    Option("temperature", "float", 1.0, least=0),  # 0: greedy
)
INPUTS = parse_ports("prompt: i32[rows, prompt~]")
OUTPUTS = ("tokens", "logprobs", "mask", "text")


def outputs(draft: Draft, bound: Bound) -> dict[str, ValueType] | None:
    """Rows become `rows*group`; None when an option that sets a size is missing.

    `seq~` is the prompt followed by the response, end token included; `resp~` the response only.
    """
    group, longest = draft.options.get("n"), draft.options.get("max_new_tokens")
    longest_prompt = bound.texts["prompt"].size
    if group is None or longest is None or longest_prompt is None:
        return None
    assert draft.model
    rows = Dim((*bound.rows["rows"], Factor("group", group, draft.name)))
    response = Dim((Factor("resp", longest, draft.name),), ragged=True)
    sequence = Dim((Factor("seq", longest_prompt + longest, draft.name),), ragged=True)
    sampled = Provenance(draft.model.model, "behaviour", draft.model.lag)
    return {
        "tokens": ValueType("i32", (rows, sequence)),
        "logprobs": ValueType("f32", (rows, response), sampled),
        "mask": ValueType("bool", (rows, response)),
        "text": ValueType("str", (rows,)),
    }
