"""A document against the schema: pydantic's errors become diagnostics with places.

Entries that have errors are taken out, so that everything else is still checked for its meaning and one
run reports all errors of a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hflow.diagnostics import Diagnostic, did_you_mean
from hflow.graph.foreign.lookup import help_for_unknown, is_option, own_keys
from hflow.graph.options import brief, spelling_help
from hflow.graph.source.document import Document, KeyPath
from hflow.graph.source.run_schema import CHECKPOINT, REPLAN, SAMPLES, RunFileSpec, RunSpec
from hflow.graph.source.schema import OPS, GraphSpec, keys_at, node_path
from hflow.graph.source.schema_values import METRIC_NAME_PATTERN, METRIC_PATTERN, NAME_PATTERN

# What checking goes on with where the file's own value cannot be used; no such graph is returned.
_STAND_INS: dict[str, Any] = {"hflow": 1, "name": "graph", "loop": {"name": "step", "times": 1}}
_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "plain_scalar": "a finite number, a string, true or false",
    "finite_number": "a finite number",
    "checkpoint_type": "a number of steps, a mapping, or false",
    "hang_type": "a mapping, or false",
    "samples_type": "a number of steps, a mapping, or false",
    "replan_type": "a number of steps, a mapping, true or false",
}
_GLUED = re.compile(r"(\w+):(\S+)")
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


def validate(
    document: Document, failed: Sequence[KeyPath] = ()
) -> tuple[GraphSpec | None, tuple[Diagnostic, ...]]:
    """The part of the document that has the right shape, and a diagnostic for everything else.

    `failed` are paths known to be wrong already: nothing is reported there. The first result is None
    when no entry is left to check.
    """
    plain = document.plain()
    if not isinstance(plain, dict):
        message = "a graph file is a mapping with the keys " + ", ".join(keys_at(()) or ())
        return None, (Diagnostic("HF103", message, document.span(())),)
    try:
        if not failed:
            return GraphSpec.model_validate(plain), ()
        GraphSpec.model_validate(plain)
        errors: list[ErrorDetails] = []
    except ValidationError as error:
        errors = error.errors()
    paths = [_path(e["loc"]) for e in errors]
    unknown = [p for e, p in zip(errors, paths) if e["type"] == "extra_forbidden"]
    found = [
        _diagnostic(document, error, path)
        for error, path in zip(errors, paths)
        if not _inside(path, failed) and not (error["type"] == "missing" and _misspelt(path, unknown))
    ]
    for path in (*paths, *failed):
        _take_out(plain, path)  # pyright: ignore[reportUnknownArgumentType]
    try:
        return GraphSpec.model_validate(plain), tuple(found)
    except ValidationError:
        return None, tuple(found)


def validate_run(document: Document) -> tuple[RunSpec | None, tuple[Diagnostic, ...]]:
    """The section `run` of a document that holds no other; None, and diagnostics, when something is wrong."""
    plain = document.plain()
    if not isinstance(plain, dict):
        return None, (Diagnostic("HF103", "expected a mapping with the key `run`", document.span(())),)
    try:
        return RunFileSpec.model_validate(plain).run, ()
    except ValidationError as error:
        return None, tuple(_diagnostic(document, e, _path(e["loc"])) for e in error.errors())


def _path(loc: tuple[int | str, ...]) -> KeyPath:
    """Where pydantic's location lies in the document: it adds the ops of nodes, and marks keys."""
    for at in (2, 4):
        if loc[0] == "nodes" and len(loc) > at and loc[at - 2] == "nodes" and loc[at] in OPS:
            loc = (*loc[:at], *loc[at + 1 :])
    return loc[:-1] if loc[-1:] == ("[key]",) else loc


def _inside(path: KeyPath, failed: Sequence[KeyPath]) -> bool:
    return any(path[: len(f)] == f for f in failed)


def _misspelt(missing: KeyPath, unknown: Sequence[KeyPath]) -> bool:
    """Whether a missing key stands in its mapping under a similar name, or under another library's, which is
    reported already."""
    beside = [str(p[-1]) for p in unknown if p[:-1] == missing[:-1]]
    is_foreign = any(missing[-1] in own_keys(name) for name in beside)
    return is_foreign or bool(difflib.get_close_matches(str(missing[-1]), beside, n=1))


def _take_out(plain: dict[str, Any], path: KeyPath) -> None:
    section = str(path[0])
    if (node := node_path(path)) and len(node) > 2:
        inner = _mapping(_mapping(_mapping(plain, "nodes"), str(node[1])), "nodes")
        inner.pop(str(node[3]), None)
        if inner:
            return
    if (
        section in ("params", "models", "evaluations", "nodes")
        and len(path) > 1
        and isinstance(plain.get(section), dict)
    ):
        plain[section].pop(path[1], None)
        return
    plain.pop(section, None)
    if section in _STAND_INS:
        plain[section] = _STAND_INS[section]


def _mapping(plain: dict[str, Any], key: str) -> dict[str, Any]:
    found = plain.get(key)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _diagnostic(document: Document, error: ErrorDetails, path: KeyPath) -> Diagnostic:
    if path[-1] == "from" and document.get(path) is None:  # written short: `port: node.port`
        path = path[:-1]
    if path[:-1] in (CHECKPOINT, SAMPLES, REPLAN) and path[-1] == "every" and document.get(path) is None:
        path = path[:-1]  # `checkpoint: 10`
    kind, key = error["type"], str(path[-1])
    where = f"`{'.'.join(map(str, path[:-1]))}`" if path[:-1] else "the file"
    match kind:
        case "missing":
            return Diagnostic("HF101", f"{where} has no `{key}`", document.span(path[:-1], key=True))
        case "union_tag_not_found":
            message = f"`{'.'.join(map(str, path))}` has no `op`"
            help_ = "; ".join(filter(None, (_meant_node(document, path), "ops: " + ", ".join(OPS))))
            return Diagnostic("HF101", message, document.span(path, key=True), help_)
        case "union_tag_invalid":
            tag = str(error.get("ctx", {}).get("tag"))
            span = document.span((*path, "op"))
            if tag == "repeat":
                return Diagnostic("HF224", "a region stands in a region", span, "regions do not nest")
            return Diagnostic("HF103", f"unknown op `{tag}`", span, did_you_mean(tag, OPS, "ops"))
        case "extra_forbidden":
            node = document.get(node_path(path) or ())
            op = node.child("op") if node else None
            kind = str(op.value) if op else ""
            known = keys_at(path[:-1], kind or None) or ()
            if path[:-1] == node_path(path) and is_option(key, kind):
                help_ = f"options of a node stand under `with`: `with: {{{key}: {brief(error['input'])}}}`"
            else:
                help_ = help_for_unknown(key, known, "keys")
            return Diagnostic("HF102", f"unknown key `{key}`", document.span(path, key=True), help_)
        case "string_pattern_mismatch" if error.get("ctx", {}).get("pattern") == NAME_PATTERN:
            name = str(error["input"])
            help_ = "names are lower case: letters, digits and `_`, not starting with a digit"
            span = document.span(path, key=error["loc"][-1] == "[key]")
            return Diagnostic("HF106", f"bad name `{name}`", span, help_)
        case "string_pattern_mismatch" if error.get("ctx", {}).get("pattern") == METRIC_NAME_PATTERN:
            help_ = "letters, digits, `_`, `-` and `@`, like `pass@4`"
            span = document.span(path, key=True)
            return Diagnostic("HF106", f"bad name `{error['input']}` of a metric", span, help_)
        case _:
            expected = "a reference `node.port`" if _is_source(path) else _expectation(error)
            named = f"{path[-2]}[{key}]" if isinstance(path[-1], int) and len(path) > 1 else key
            message = f"`{named}` must be {expected}, got {brief(error['input'])}"
            is_no_eval = path == ("eval", "rows") and error["input"] == 0
            help_ = "without evaluation: `eval: null`" if is_no_eval else _hint(kind, key, error["input"])
            help_ = "; ".join(filter(None, [help_, document.where_set(path)]))
            return Diagnostic("HF103", message, document.span(path), help_)


def _meant_node(document: Document, path: KeyPath) -> str:
    """Help for a node that says something of another one, which the file inherits, under a similar name."""
    own = document.get(path[:-1])
    beside = (
        [str(name) for name in own.value if name != path[-1]]
        if own and isinstance(own.value, Mapping)
        else []
    )
    near = difflib.get_close_matches(str(path[-1]), beside, n=1)
    return f"did you mean `{near[0]}`? A new node needs an op" if near else ""


def _hint(kind: str, key: str, value: Any) -> str:
    """Help on values that YAML reads otherwise than they look."""
    kind = kind.removesuffix("_type")
    if value is None and ":" in key:  # `{lr:1e-4}`
        name, _, written = key.partition(":")
        return f"put a space after the colon: `{name}: {written}`"
    if kind in ("dict", "model") and isinstance(value, str) and (glued := _GLUED.fullmatch(value)):
        return f"put a space after the colon: `{glued[1]}: {glued[2]}`"
    return spelling_help(kind, value)


def _is_source(path: KeyPath) -> bool:
    return path[-2:-1] == ("in",) or (path[-3:-2] == ("in",) and path[-1] == "from")


def _expectation(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _BOUNDS:
        bound, sign = _BOUNDS[kind]
        limit = context[bound]
        return f"{sign} {int(limit) if float(limit).is_integer() else limit}"
    if kind == "string_pattern_mismatch":
        is_metric = context.get("pattern") == METRIC_PATTERN
        return "a metric like `reward_mean` or `loss.actor_train`" if is_metric else "a reference `node.port`"
    if kind == "literal_error":
        return str(context["expected"])
    if kind in ("too_short", "string_too_short"):
        return "not empty"
    return error["msg"]
