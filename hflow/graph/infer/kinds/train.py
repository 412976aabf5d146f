"""`train`: optimizer steps (AdamW, arXiv:1711.05101) on a typed loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hflow.graph.infer.functions import FunctionSource
from hflow.graph.infer.signature import Port, Signature, kept_port, routes_port
from hflow.graph.ir import Head, Node
from hflow.graph.options import Option, OptionProblem
from hflow.graph.types import Dim, Factor, ValueType

OPTIONS = (
    Option("lr", "float", least=0),
    Option("betas", "floats", [0.9, 0.999], least=0, below=1, length=2),
    Option("eps", "float", 1e-8, above=0),
    Option("weight_decay", "float", 0.0, least=0),
    Option("clip_grad", "float", 1.0, least=0),  # 0: no clipping
    Option("warmup_steps", "int", 0, least=0),
    Option("aggregate", "str", "token_mean", choices=("token_mean", "sequence_mean", "sequence_sum")),
    Option("temperature", "float", 1.0, above=0),
    Option("max_lag", "int", 0, least=0),  # how many updates old the values may be that it learns from
    # A node without the following does not have them: what was planned and saved before they existed stays.
    Option("schedule", "str", optional=True, choices=("constant", "linear", "cosine", "wsd")),
    Option("min_lr", "float", optional=True, least=0),
    Option("decay_steps", "int", optional=True, above=0),  # of `wsd`
    Option("freeze", "texts", optional=True),  # patterns of names of parameters
    Option("balance_coef", "float", optional=True, least=0),  # of models with experts
)
FALLING = ("linear", "cosine", "wsd")  # schedules that end at `min_lr` with the last update of the run
SHARED = ("betas", "eps")  # of the optimizer, which all train nodes of a model share
# What a train node computes with the model that it trains, by the head that this takes.
COMPUTED: dict[str, Head] = {"logprobs": "lm", "entropy": "lm", "values": "scalar", "score": "scalar"}
OF_ROWS = ("score",)  # those of them that are one number per row; the others are one per response token
HEAD_TEXT = {name: f"`head: {head}`" for name, head in COMPUTED.items()}
_LOSS_FORM = (
    "`loss: f32[rows, resp~]` or `loss: f32[rows]`, or `loss: f32[groups]` of inputs over `groups*k` rows"
)


def inputs(loss: Signature) -> tuple[Port, ...]:
    """The ports of a train node: its tokens and mask, what the loss reads over edges, and, for log-probs as
    the sampler has them, of a truncated distribution `kept`, of a model with experts `routes`."""
    rows = _rows(loss)
    tokens = Port("tokens", ValueType("i32", (rows, _ragged("seq"))))
    mask = Port("mask", ValueType("bool", (rows, _ragged("resp"))))
    read = tuple(p for p in loss.inputs if p.tag != "trained" and p.name != "mask")
    sampled = kept_port(rows, optional=True), routes_port(rows)
    return (tokens, mask, *read, *(sampled if any(map(_of_logits, loss.inputs)) else ()))


def _of_logits(port: Port) -> bool:
    return port.tag == "trained" and COMPUTED.get(port.name) == "lm"


def loss_problem(source: FunctionSource) -> str | None:
    """Why a function cannot be a loss, or None."""
    options = [o.name for o in source.options]
    if source.signature.outputs[0].name != "loss":
        return f"a loss returns {_LOSS_FORM}, not `{source.signature.outputs[0]}`"
    if source.whole_batch:
        return "a loss sees a part of the batch at a time, so it cannot be `whole_batch`"
    if clash := sorted({o.name for o in OPTIONS} & set(options)):
        return f"its option `{clash[0]}` is one of the train node itself"
    if taken := [p.name for p in source.signature.inputs if p.name in ("kept", "routes")]:
        return f"its input `{taken[0]}` is one of the train node itself"
    return _signature_problem(source.signature, options)


def _signature_problem(loss: Signature, options: Sequence[str]) -> str | None:
    rows = _rows(loss)
    per_row, per_token = (rows,), (rows, _ragged("resp"))
    optional_token = (rows, Dim(_ragged("resp").factors, ragged=True, optional=True))
    if len(rows.factors) > 2:
        return f"a loss reads `rows` or `groups*k`, not `{rows}`"
    shapes = [per_row, per_token] + ([(Dim(rows.factors[:1]),)] if len(rows.factors) == 2 else [])
    for port in loss.outputs:
        if port.type.dtype != "f32" or port.type.dims not in shapes:
            return f"a loss returns {_LOSS_FORM}, not `{port}`"
    for port in loss.inputs:
        if problem := _input_problem(port, [*shapes, optional_token], options):
            return problem
    return None


def _input_problem(port: Port, shapes: Sequence[tuple[Dim, ...]], options: Sequence[str]) -> str | None:
    """`shapes`: per row, per response token, and what else a loss may read."""
    per_row, per_token = (ValueType("f32", dims) for dims in shapes[:2])
    computed = per_row if port.name in OF_ROWS else per_token
    if port.tag == "trained" and (port.name not in COMPUTED or port.type != computed):
        return f"`{port}`: a train node computes {', '.join(COMPUTED)}, as `{computed}`"
    if port.tag == "trained" and port.optional and f"{port.name}_coef" not in options:
        return f"`{port}` is computed where the option `{port.name}_coef` is not 0, and there is none"
    if port.type.dims not in shapes or port.type.dtype == "str":
        what = "per row, per group or per response token"
        return f"`{port}`: a loss reads numbers {what} of the rows that it returns"
    if port.name == "mask" and port.type != ValueType("bool", per_token.dims):
        return f"`{port}`: the mask of a loss is `{ValueType('bool', per_token.dims)}`"
    return None


def missing_head(loss: Signature, head: Head) -> str | None:
    """The first input that a model with this head cannot compute."""
    return next((p.name for p in loss.inputs if p.tag == "trained" and COMPUTED[p.name] != head), None)


def option_problems(
    loss: Signature, head: Head | None, written: Mapping[str, Any]
) -> Iterator[OptionProblem]:
    """HF212 for options without effect."""
    if "aggregate" in written and len(loss.outputs[0].type.dims) == 1:
        yield OptionProblem("HF212", "`aggregate` has no effect: the loss is not per token", "aggregate")
    if head == "scalar" and "temperature" in written:
        yield OptionProblem(
            "HF212", "`temperature` has no effect: a scalar head has no logits", "temperature"
        )
    yield from _schedule_problems(written)


def _schedule_problems(written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    """What schedules need and what has no effect on them. Bad values of the options are told elsewhere."""
    schedule, lr, min_lr = (written.get(name) for name in ("schedule", "lr", "min_lr"))
    falls = "choose one that falls: " + ", ".join(f"`schedule: {name}`" for name in FALLING)
    if "min_lr" in written and schedule in (None, "constant"):
        yield OptionProblem("HF212", "`min_lr` has no effect: the rate does not fall", "min_lr", falls)
    if "decay_steps" in written and schedule in (None, "constant", "linear", "cosine"):
        message = "`decay_steps` has no effect: only `schedule: wsd` has a stretch in which it falls"
        yield OptionProblem("HF212", message, "decay_steps")
    if schedule == "wsd" and "decay_steps" not in written:
        help_ = "`decay_steps` is how many of the last updates the rate falls over"
        yield OptionProblem("HF101", "missing option `decay_steps` of `schedule: wsd`", None, help_)
    are_numbers = all(isinstance(rate, (int, float)) for rate in (lr, min_lr))
    if are_numbers and min_lr > lr:  # pyright: ignore[reportOptionalOperand]
        yield OptionProblem("HF212", f"`min_lr` {min_lr:g} is above `lr` {lr:g}", "min_lr")


def frozen_patterns(node: Node) -> tuple[str, ...]:
    """Of the names of parameters that a train node leaves as they are."""
    written = node.options.get("freeze", ())
    return (written,) if isinstance(written, str) else tuple(written)


def balance_coef(node: Node) -> float:
    """By which the balancing loss of a train node is multiplied; 0: it has none."""
    return node.options.get("balance_coef", 0.0)


def _rows(loss: Signature) -> Dim:
    """The rows that a loss is over: those of its first input."""
    return loss.inputs[0].type.dims[0] if loss.inputs[0].type.dims else Dim((Factor("rows"),))


def _ragged(name: str) -> Dim:
    return Dim((Factor(name),), ragged=True)
