"""`generate`: samples `n` responses per prompt, or goes on with a conversation.

The first form reads `prompt`. The other reads what an earlier turn made (`tokens`, `mask`, `logprobs`) and an
`observation` per row (what a tool or an environment answered): the observation is appended, masked
out, and the model goes on from there. A row with an empty observation is finished and stays as it is.

With `in_flight`, weights that come while the first form samples serve the rest of every response
(PipelineRL, arXiv:2509.19128); the node then also tells the `versions` of all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.signature import Port, parse_ports
from hflow.graph.infer.unify import Bindings
from hflow.graph.options import Option
from hflow.graph.types import Dim, Factor, Provenance, ValueType

_SAMPLING = (
    Option("max_new_tokens", "int", above=0),
    Option("temperature", "float", 1.0, least=0),  # 0: greedy
)
OPTIONS = (Option("n", "int", 1, above=0), *_SAMPLING, Option("in_flight", "bool", False))
CONTINUE_OPTIONS = (Option("max_observation_tokens", "int", above=0), *_SAMPLING)
INPUTS = parse_ports("prompt: i32[rows, prompt~]")
CONTINUE_INPUTS = parse_ports(
    "tokens: i32[rows, seq~], mask: bool[rows, resp~], logprobs: f32[rows, resp~]<behaviour>, "
    "observation: str[rows]"
)
OUTPUTS = ("tokens", "logprobs", "mask", "text")
VERSIONS = "versions"


def inputs(written: Set[str]) -> tuple[Port, ...]:
    """The ports of a node whose file entry wires `written`."""
    return CONTINUE_INPUTS if continues(written) else INPUTS


def options(written: Set[str]) -> tuple[Option, ...]:
    return CONTINUE_OPTIONS if continues(written) else OPTIONS


def ports(options: Mapping[str, Any]) -> tuple[str, ...]:
    """What a node with these options makes."""
    return (*OUTPUTS, VERSIONS) if options.get("in_flight") else OUTPUTS


def continues(written: Set[str]) -> bool:
    """Whether a node with these inputs goes on with a conversation."""
    return bool(written & {"tokens", "observation"})


def outputs(draft: NodeDraft, bound: Bindings) -> dict[str, ValueType] | None:
    """Rows become `rows*group`, or stay as they are in a later turn; None when an option that sets a size
    is missing.

    `seq~` is the prompt followed by the response, end token included; `resp~` everything after the prompt.
    """
    longest = draft.options.get("max_new_tokens")
    if longest is None:
        return None
    if continues(draft.sources.keys()):
        return _continued(draft, bound, longest)
    group, longest_prompt = draft.options.get("n"), bound.texts["prompt"].size
    if group is None or longest_prompt is None:
        return None
    rows = Dim((*bound.rows["rows"], Factor("group", group, draft.name)))
    return _made(draft, rows, longest_prompt + longest, longest, lag=0)


def _continued(draft: NodeDraft, bound: Bindings, longest: int) -> dict[str, ValueType] | None:
    observation = draft.options.get("max_observation_tokens")
    before, response = bound.texts["seq"].size, bound.texts["resp"].size
    if observation is None or before is None or response is None:
        return None
    more = observation + longest
    earlier = bound.made_by["logprobs"].lag
    return _made(draft, Dim(bound.rows["rows"]), before + more, response + more, earlier)


def _made(
    draft: NodeDraft, rows: Dim, longest_sequence: int, longest_response: int, lag: int
) -> dict[str, ValueType]:
    """`lag` is that of the turns before: a conversation is as old as its oldest turn."""
    assert draft.model
    response = Dim((Factor("resp", longest_response, draft.name),), ragged=True)
    sequence = Dim((Factor("seq", longest_sequence, draft.name),), ragged=True)
    sampled = Provenance(draft.model.model, "behaviour", max(lag, draft.model.lag))
    made = {
        "tokens": ValueType("i32", (rows, sequence)),
        "logprobs": ValueType("f32", (rows, response), sampled),
        "mask": ValueType("bool", (rows, response)),
        "text": ValueType("str", (rows,)),
        VERSIONS: ValueType("i32", (rows, response)),
    }
    return {port: made[port] for port in ports(draft.options)}
