"""`data`: draws `batch` rows of a dataset each step, as text fields, as numbers or as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from hflow.diagnostics import did_you_mean
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.kinds import chat
from hflow.graph.infer.kinds.data_options import row_problems
from hflow.graph.infer.signature import Port
from hflow.graph.options import Option, OptionProblem
from hflow.graph.row_sources import PROCEDURAL, SUCCESS, is_mixture
from hflow.graph.templates.budget import BadTemplateError
from hflow.graph.templates.template import Template
from hflow.graph.types import Dim, Factor, ValueType

OPTIONS = (
    Option("dataset", "dataset"),
    Option("batch", "int", above=0),
    Option("prompt", "str", None),
    Option("response", "texts", None),
    Option("tokenizer", "str", None),
    Option("shuffle", "bool", True),
    Option("holdout", "int", 0, least=0),
    Option("size", "int", 4096, above=0),
    Option("options", "mapping", {}),
    Option("max_prompt_tokens", "int", 512, above=0),
    Option("max_response_tokens", "int", 512, above=0),
    Option("numbers", "mapping", optional=True),
    *chat.OPTIONS,
    Option("config", "str", optional=True),
    Option("split", "str", optional=True),
    Option("revision", "str", optional=True),
    Option("rename_columns", "mapping", optional=True),
    Option("filter", "str", optional=True),
    Option("curriculum", "mapping", optional=True),
    Option("streaming", "switch", optional=True),
)
# What a curriculum by success reads of earlier steps. Which rows it has is checked once all types are known.
FEEDBACK = (Port(SUCCESS, ValueType("f32", (Dim((Factor("rows"),)),)), optional=True),)
# (dtype, ragged dim) of the columns that a data node can make, and those that are of responses.
_COLUMNS = {("i32", "prompt"), ("i32", "seq"), ("bool", "resp"), ("str", None), ("f32", None)}
_OF_RESPONSES = ("seq", "resp")
_COLUMNS_TEXT = "i32[batch, prompt~], i32[batch, seq~], bool[batch, resp~], str[batch] or f32[batch]"


def num_responses(written: Mapping[str, Any]) -> int | None:
    """How many responses a row has, where `response`, `messages` or `completion` is a list; each is a row of
    its own then."""
    response = written.get("response")
    return len(cast("list[Any]", response)) if isinstance(response, list) else chat.conversations(written)


def number_columns(columns: Mapping[str, ValueType]) -> dict[str, bool]:
    """The columns of numbers, and whether each response has one."""
    return {name: len(t.dims[0].factors) > 1 for name, t in columns.items() if t.dtype == "f32"}


def number_templates(written: Any) -> tuple[str, ...]:
    """What `numbers` says of a column, as templates: a number stands for itself."""
    items = cast("list[Any]", written) if isinstance(written, list | tuple) else [written]
    return tuple(str(item) for item in items if item is not None)


def column_problem(type_: ValueType, responses: int | None) -> str | None:
    """Why a data node whose rows have so many `responses` cannot make a column of this type, or None."""
    rows, *rest = type_.dims or (Dim((), ragged=True),)
    ragged = rest[0].factors[0].name if len(rest) == 1 and rest[0].ragged else None
    is_column = len(rest) <= 1 and (ragged is not None or not rest) and (type_.dtype, ragged) in _COLUMNS
    if not is_column or rows.ragged:
        return f"a data node cannot make `{type_}`; it makes {_COLUMNS_TEXT}"
    if responses is not None and ragged in _OF_RESPONSES:
        several = len(rows.factors) == 2
        column = f"{type_.dtype}[{rows}*k, {ragged}~]"
        return (
            None if several else f"`{type_}`: a row has a list of {responses} responses, so write `{column}`"
        )
    if responses is not None and type_.dtype == "f32" and len(rows.factors) == 2:
        return None
    if len(rows.factors) != 1:
        return f"rows of a data node are one new dim, not `{rows}`"
    return None


def option_problems(declared: Mapping[str, ValueType], written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    """What the columns ask of the options: HF101 for a missing template, HF212 for one without effect; and
    what is wrong with where rows come from."""
    yield from row_problems(written)
    ragged = {d.factors[0].name for t in declared.values() for d in t.dims if d.ragged}
    numbers = number_columns(declared)
    responds = bool(ragged & {"resp", "seq"})
    procedural = str(written.get("dataset", PROCEDURAL)).startswith(PROCEDURAL)
    no_size = "`dataset` is a mixture" if is_mixture(written) else f"the dataset is not `{PROCEDURAL}NAME`"
    is_chat = chat.is_chat(written)
    if ragged and "prompt" not in written and not is_chat:
        help_ = "a jinja2 template over the row's fields, like `{{ question }}`"
        yield OptionProblem("HF101", "missing option `prompt`", None, help_)
    if responds and "response" not in written and not is_chat:
        help_ = "a jinja2 template over the row's fields, like `{{ answer }}`"
        yield OptionProblem("HF101", "missing option `response`", None, help_)
    effects = {
        "no column has tokens": ([] if ragged else ["prompt", "max_prompt_tokens", "tokenizer"]),
        "no column has `seq~` or `resp~`": ([] if responds else ["response", "max_response_tokens"]),
        no_size: ([] if procedural else ["size", "options"]),
    }
    for reason, names in effects.items():
        for name in names:
            if name in written:
                help_ = f"remove it; one that the file inherits is removed by `{name}: null`"
                yield OptionProblem("HF212", f"`{name}` has no effect: {reason}", name, help_)
    yield from chat.option_problems(written, bool(ragged), responds)
    for name in ("prompt", "response", *chat.TEMPLATES):
        value = written.get(name)
        for text in cast("list[Any]", value) if isinstance(value, list) else [value]:
            yield from _template_problems(name, text)
    yield from _number_problems(numbers, num_responses(written), written.get("numbers"))


def _number_problems(
    columns: Mapping[str, bool], responses: int | None, written: Any
) -> Iterator[OptionProblem]:
    """HF212: `numbers` says something of no column, or not one template for each number."""
    for name, value in cast("dict[str, Any]", written).items() if isinstance(written, dict) else ():
        if name not in columns:
            message = f"`numbers.{name}` has no effect: no column `{name}` is `f32[batch]`"
            yield OptionProblem("HF212", message, "numbers", did_you_mean(name, columns, "columns"))
            continue
        wanted = (responses or 1) if columns[name] else 1
        given = cast("list[Any]", value) if isinstance(value, list) else [value]
        if isinstance(value, list) != columns[name] or len(given) != wanted:
            what = f"a list of {wanted}, one for each response" if columns[name] else "one number or template"
            yield OptionProblem("HF212", f"`numbers.{name}` must be {what}", "numbers")
        elif any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in given):
            yield OptionProblem("HF212", f"`numbers.{name}` must hold templates or numbers", "numbers")
        for text in given:
            yield from _template_problems("numbers", text)


def _template_problems(name: str, text: Any) -> Iterator[OptionProblem]:
    try:
        Template(text if isinstance(text, str) else "")
    except BadTemplateError as error:
        yield OptionProblem("HF212", f"`{name}` is no template: {error.message}", name, error.help)


def outputs(draft: NodeDraft) -> dict[str, ValueType] | None:
    """The declared columns with sizes; None when an option that sets a size is missing."""
    sizes = [draft.options.get(n) for n in ("batch", "max_prompt_tokens", "max_response_tokens")]
    batch, prompt, response = sizes
    if batch is None or prompt is None or response is None:
        return None
    longest = {"prompt": prompt, "resp": response, "seq": prompt + response}

    in_a_row = num_responses(draft.options) or 1

    def made(dim: Dim) -> Dim:
        name, *several = (f.name for f in dim.factors)
        first = Factor(name, longest[name] if dim.ragged else batch, draft.name)
        return Dim((first, *(Factor(k, in_a_row, draft.name) for k in several)), dim.ragged)

    return {n: ValueType(t.dtype, tuple(map(made, t.dims))) for n, t in draft.declared.items()}
