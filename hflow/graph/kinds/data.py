"""`data`: draws `batch` rows of a dataset each step, as text fields or as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hflow.graph.draft import Draft
from hflow.graph.options import Option, OptionProblem
from hflow.graph.types import Dim, Factor, ValueType

OPTIONS = (
    Option("dataset", "str"),
    Option("batch", "int", above=0),
    Option("prompt", "str", None),
    Option("response", "str", None),
    Option("tokenizer", "str", None),
    Option("shuffle", "bool", True),
    Option("holdout", "int", 0, least=0),
    Option("size", "int", 4096, above=0),
    Option("options", "mapping", {}),
    Option("max_prompt_tokens", "int", 512, above=0),
    Option("max_response_tokens", "int", 512, above=0),
)
PROCEDURAL = "reasoning-gym/"
# (dtype, ragged dim) of the columns that a data node can make.
_COLUMNS = {("i32", "prompt"), ("i32", "seq"), ("bool", "resp"), ("str", None)}
_COLUMNS_TEXT = "i32[batch, prompt~], i32[batch, seq~], bool[batch, resp~] or str[batch]"


def column_problem(type_: ValueType) -> str | None:
    """Why a data node cannot make a column of this type, or None."""
    rows, *rest = type_.dims or (Dim((), ragged=True),)
    ragged = rest[0].factors[0].name if len(rest) == 1 and rest[0].ragged else None
    is_column = len(rest) <= 1 and (ragged is not None or not rest) and (type_.dtype, ragged) in _COLUMNS
    if not is_column or rows.ragged:
        return f"a data node cannot make `{type_}`; it makes {_COLUMNS_TEXT}"
    if len(rows.factors) != 1:
        return f"rows of a data node are one new dim, not `{rows}`"
    return None


def option_problems(declared: Mapping[str, ValueType], written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    """What the columns ask of the options: HF101 for a missing template, HF212 for one without effect."""
    ragged = {d.factors[0].name for t in declared.values() for d in t.dims if d.ragged}
    responds = bool(ragged & {"resp", "seq"})
    procedural = str(written.get("dataset", PROCEDURAL)).startswith(PROCEDURAL)
    if ragged and "prompt" not in written:
        help_ = "a jinja2 template over the row's fields, like `{{ question }}`"
        yield OptionProblem("HF101", "missing option `prompt`", None, help_)
    if responds and "response" not in written:
        help_ = "a jinja2 template over the row's fields, like `{{ answer }}`"
        yield OptionProblem("HF101", "missing option `response`", None, help_)
    effects = {
        "no column has tokens": ([] if ragged else ["prompt", "max_prompt_tokens", "tokenizer"]),
        "no column has `seq~` or `resp~`": ([] if responds else ["response", "max_response_tokens"]),
        f"the dataset is not `{PROCEDURAL}NAME`": ([] if procedural else ["size", "options"]),
    }
    for reason, names in effects.items():
        for name in names:
            if name in written:
                yield OptionProblem("HF212", f"`{name}` has no effect: {reason}", name)
    for name in ("prompt", "response"):
        if message := _template_problem(written.get(name)):
            yield OptionProblem("HF212", f"`{name}` is no jinja2 template: {message}", name)


def _template_problem(text: Any) -> str | None:
    try:
        ImmutableSandboxedEnvironment().parse(text if isinstance(text, str) else "")
    except TemplateSyntaxError as error:
        return error.message
    except RecursionError:
        return "nested too deeply"
    return None


def outputs(draft: Draft) -> dict[str, ValueType] | None:
    """The declared columns with sizes; None when an option that sets a size is missing."""
    sizes = [draft.options.get(n) for n in ("batch", "max_prompt_tokens", "max_response_tokens")]
    batch, prompt, response = sizes
    if batch is None or prompt is None or response is None:
        return None
    longest = {"prompt": prompt, "resp": response, "seq": prompt + response}

    def made(dim: Dim) -> Dim:
        name = dim.factors[0].name
        return Dim((Factor(name, longest[name] if dim.ragged else batch, draft.name),), dim.ragged)

    return {n: ValueType(t.dtype, tuple(map(made, t.dims))) for n, t in draft.declared.items()}
