"""`generate`: samples `n` responses per prompt, or goes on with a conversation.

The first form reads `prompt`. The other reads what an earlier turn made (`tokens`, `mask`, `logprobs`) and an
`observation` per row (what a tool or an environment answered): the observation is appended, masked
out, and the model goes on from there. A row with an empty observation is finished and stays as it is. With a
`role`, the observation becomes a message of that role, written by the chat template.

With `in_flight`, weights that come while the first form samples serve the rest of every response
(PipelineRL, arXiv:2509.19128); the node then also tells the `versions` of all tokens.

With `max_kept` a node that truncates its distribution tells of every token among which it was chosen, so that
others can take log-probs of the same distribution. `finish` says how each response ended. `routes`, of the
first form, has the experts that each layer's router chose for each token, in the order of layers; -1 for the
last token of a row, which is never an input ("rollout routing replay", arXiv:2510.11370). Both are made where
some node reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.kinds import chat
from hflow.graph.infer.signature import Port, kept_port, parse_ports
from hflow.graph.infer.unify import Bindings
from hflow.graph.options import Option, OptionProblem
from hflow.graph.types import (
    CHOICE,
    Dim,
    Distribution,
    Factor,
    Provenance,
    Role,
    ShapedProvenance,
    Truncation,
    ValueType,
)

_SAMPLING = (
    Option("max_new_tokens", "int", above=0),
    Option("temperature", "float", 1.0, least=0),  # 0: greedy
)
_SHAPING = (
    Option("top_p", "float", above=0, most=1, optional=True),
    Option("top_k", "int", above=0, optional=True),
    Option("min_p", "float", least=0, most=1, optional=True),
    Option("max_kept", "int", above=0, optional=True),
    Option("stop", "texts", optional=True),
    Option("stop_token_ids", "ints", least=0, optional=True),
    Option("mask_truncated", "bool", optional=True),
)
_TURNS = (
    Option("role", "str", optional=True),
    Option("chat_template", "str", optional=True),
    Option("template_args", "mapping", optional=True),
)
OPTIONS = (Option("n", "int", 1, above=0), *_SAMPLING, Option("in_flight", "bool", False), *_SHAPING)
CONTINUE_OPTIONS = (Option("max_observation_tokens", "int", above=0), *_SAMPLING, *_SHAPING, *_TURNS)
INHERITED = ("temperature", "top_p", "top_k", "min_p")  # by later turns, where these do not say it
INPUTS = parse_ports("prompt: i32[rows, prompt~]")
CONTINUE_INPUTS = parse_ports(
    "tokens: i32[rows, seq~], mask: bool[rows, resp~], logprobs: f32[rows, resp~]<behaviour>, "
    "observation: str[rows]"
)
OUTPUTS = ("tokens", "logprobs", "mask", "text")
_ROLES: tuple[Role, ...] = ("behaviour", "support")
VERSIONS = "versions"
KEPT = "kept"
FINISH = "finish"
ROUTES = "routes"
WHERE_READ = (FINISH, ROUTES)  # made only where some node reads it
# What `finish` says of a response.
LENGTH, END_TOKEN, STOP, WAS_FINISHED = 0, 1, 2, 3
FINISHES = ("length", "eos", "stop", "finished")  # the same for people


def inputs(written: Set[str], options: Mapping[str, Any]) -> tuple[Port, ...]:
    """The ports of a node whose file entry wires `written` and says these `options`."""
    if not continues(written):
        return INPUTS
    earlier = (kept_port(Dim((Factor("rows"),)), optional=False),) if "max_kept" in options else ()
    return (*CONTINUE_INPUTS, *earlier)


def options(written: Set[str]) -> tuple[Option, ...]:
    return CONTINUE_OPTIONS if continues(written) else OPTIONS


def ports(written: Set[str], options: Mapping[str, Any]) -> tuple[str, ...]:
    """What a node with these inputs and options makes, of `WHERE_READ` if some node reads it."""
    versions = (VERSIONS,) if options.get("in_flight") else ()
    kept = (KEPT,) if "max_kept" in options else ()
    routes = () if continues(written) else (ROUTES,)
    return (*OUTPUTS, *versions, *kept, FINISH, *routes)


def option_problems(written: Mapping[str, Any], further: bool) -> Iterator[OptionProblem]:
    """HF212 for options that contradict each other, or have no effect. A `further` turn takes over what
    earlier ones say."""
    yield from _sampling_problems(written, further)
    yield from _turn_problems(written, further)


def _sampling_problems(written: Mapping[str, Any], further: bool) -> Iterator[OptionProblem]:
    texts: Any = written.get("stop")
    if texts == "" or (isinstance(texts, list) and "" in texts):
        yield OptionProblem("HF212", "`stop` has an empty string: every response would end at once", "stop")
    truncates = [name for name in ("top_p", "top_k", "min_p") if name in written]
    greedy = written.get("temperature") == 0 and not isinstance(written.get("temperature"), bool)
    if greedy:
        for name in (*truncates, *(n for n in ("max_kept",) if n in written)):
            message = f"`{name}` has no effect: at temperature 0 the most likely token is taken"
            yield OptionProblem("HF212", message, name)
    elif "max_kept" in written and not further and not Truncation.of(written):
        message = "`max_kept` has no effect: without `top_p`, `top_k` or `min_p` all tokens are kept"
        yield OptionProblem("HF212", message, "max_kept")


def distribution(options: Mapping[str, Any]) -> Distribution:
    """That a node with these options samples from."""
    return Distribution(options.get("temperature", 1.0), Truncation.of(options))


def _turn_problems(written: Mapping[str, Any], further: bool) -> Iterator[OptionProblem]:
    """What has no effect without a `role`, which only a further turn has; and arguments for no template."""
    if further and "role" not in written:
        for name in (n for n in ("chat_template", "template_args") if n in written):
            help_ = "`role: tool` makes an observation a message, which the chat template writes"
            yield OptionProblem("HF212", f"`{name}` has no effect without `role`", name, help_)
    if further and written.get("role") == "assistant":
        help_ = "`tool`, `user`, or what the chat template calls it"
        yield OptionProblem("HF212", "an observation is not the assistant's", "role", help_)
    yield from chat.argument_problems(written)


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
    kept = draft.options.get("max_kept", 0)
    return _made(draft, rows, longest_prompt + longest, longest, kept, lag=0)


def _continued(draft: NodeDraft, bound: Bindings, longest: int) -> dict[str, ValueType] | None:
    observation = draft.options.get("max_observation_tokens")
    before, response = bound.texts["seq"].size, bound.texts["resp"].size
    if observation is None or before is None or response is None:
        return None
    more = observation + longest
    earlier = bound.made_by["logprobs"].lag
    kept = max(draft.options.get("max_kept", 0), bound.texts[KEPT].size or 0 if KEPT in bound.texts else 0)
    return _made(draft, Dim(bound.rows["rows"]), before + more, response + more, kept, earlier)


def _made(
    draft: NodeDraft, rows: Dim, longest_sequence: int, longest_response: int, most_kept: int, lag: int
) -> dict[str, ValueType]:
    """`lag` is that of the turns before: a conversation is as old as its oldest turn."""
    assert draft.model
    response = Dim((Factor("resp", longest_response, draft.name),), ragged=True)
    sequence = Dim((Factor("seq", longest_sequence, draft.name),), ragged=True)
    kept = Dim((Factor("kept", most_kept, draft.name),), ragged=True)
    of = draft.model.model, max(lag, draft.model.lag), distribution(draft.options)
    sampled, support = (ShapedProvenance.of(of[0], role, *of[1:]) for role in _ROLES)
    chosen = Dim((Factor(CHOICE, None, draft.name),))
    made = {
        "tokens": ValueType("i32", (rows, sequence)),
        "logprobs": ValueType("f32", (rows, response), sampled),
        "mask": ValueType("bool", (rows, response)),
        "text": ValueType("str", (rows,)),
        VERSIONS: ValueType("i32", (rows, response)),
        KEPT: ValueType("i32", (rows, response, kept), support),
        FINISH: ValueType("i32", (rows,)),
        ROUTES: ValueType("i16", (rows, sequence, chosen), Provenance(of[0], "routed", of[1])),
    }
    return {port: made[port] for port in ports(draft.sources.keys(), draft.options)}
