"""The JSON Schema of `with:`, by the kind of the node and, where this names one of hflow's functions, by it.

What options a user's function has, or one that a parent file names, is not known here: its node may have any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hflow.graph.infer.functions import FunctionSource, shipped_functions
from hflow.graph.infer.kinds import call, data, generate, score, train
from hflow.graph.options import REQUIRED, Kind, Option

Schema = dict[str, Any]
EXPRESSION: Schema = {"$ref": "#/definitions/Expression"}
_TEXT: Schema = {"type": "string"}
_MAPPING: Schema = {"type": "object"}
_KINDS: dict[Kind, list[Schema]] = {
    "int": [{"type": "integer"}, EXPRESSION],
    "float": [{"type": "number"}, EXPRESSION],
    "bool": [{"type": "boolean"}, EXPRESSION],
    "str": [_TEXT],
    "mapping": [_MAPPING],
    "floats": [{"type": "array"}],
    "ints": [{"type": "array"}],
    "texts": [_TEXT, {"type": "array", "items": _TEXT}],
    "tools": [_TEXT, {"type": "array", "items": _MAPPING}],
    "dataset": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "array", "items": _MAPPING}],
    "switch": [{"type": "boolean"}, _MAPPING, EXPRESSION],
}
_NULL: Schema = {"type": "null"}  # in a file that extends another, it takes what the parent says away
_CLOSED = {  # kinds of nodes whose options are known, by the name of their specs
    "DataSpec": data.OPTIONS,
    "GenerateSpec": (*generate.OPTIONS, *generate.CONTINUE_OPTIONS),
    "ScoreSpec": score.OPTIONS,
}
_OF_FUNCTION = {  # those that name a function, which adds its own: by the key that does
    "TrainSpec": ("loss", train.OPTIONS),
    "CallSpec": ("fn", call.OPTIONS),
}


def with_options(name: str, spec: Schema, partial: bool) -> Schema:
    """The schema `spec` of a kind of node, called `name`, with what stands under its `with`.

    Args:
        partial: in a file that extends another.
    """
    if name in _CLOSED:
        return _having(spec, _closed(_CLOSED[name], partial), partial)
    if name not in _OF_FUNCTION:
        return spec
    key, own = _OF_FUNCTION[name]
    known = [source for source in shipped_functions() if _is_loss(source) == (key == "loss")]
    cases = [_case(key, source, own, partial) for source in known]
    return {**_having(spec, _open(own, partial), partial), "allOf": cases}


def _is_loss(source: FunctionSource) -> bool:
    return source.signature.outputs[0].name == "loss"


def _case(key: str, source: FunctionSource, own: Sequence[Option], partial: bool) -> Schema:
    """What holds where the node names this function."""
    named = {"properties": {key: {"const": source.reference}}, "required": [key]}
    options = _closed(source.options, partial)
    options["properties"] |= {option.name: True for option in own}  # which the node's own schema describes
    return {"if": named, "then": {"properties": {"with": _or_null(options, partial)}}}


def _having(spec: Schema, options: Schema, partial: bool) -> Schema:
    return {**spec, "properties": {**spec["properties"], "with": _or_null(options, partial)}}


def _closed(options: Iterable[Option], partial: bool) -> Schema:
    """These, and no others; in a child also nulls for those of another function in the parent."""
    return _open(options, partial) | {"additionalProperties": _NULL if partial else False}


def _open(options: Iterable[Option], partial: bool) -> Schema:
    made = {option.name: _value(option, partial) for option in options}
    return {"type": "object", "properties": dict(sorted(made.items()))}


def _value(option: Option, partial: bool) -> Schema:
    schemas = [{"enum": list(option.choices)}, EXPRESSION] if option.choices else _KINDS[option.kind]
    if option.kind in ("int", "float") and not option.choices:
        number, *others = schemas
        schemas = [number | _bounds(option), *others]
    if partial or option.nullable:
        schemas = [*schemas, _NULL]
    said = {} if option.default is REQUIRED else {"default": option.default}
    return {**(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}), **said}


def _bounds(option: Option) -> Schema:
    bounds = {
        "minimum": option.least,
        "exclusiveMinimum": option.above,
        "exclusiveMaximum": option.below,
        "maximum": option.most,
    }
    return {name: limit for name, limit in bounds.items() if limit is not None}


def _or_null(schema: Schema, partial: bool) -> Schema:
    return {"anyOf": [schema, _NULL]} if partial else schema
