"""The JSON Schema (draft-07) of graph files, for editors; made from the pydantic models of `schema`.

It is wider than the models in what stands before them: every number, boolean and choice may be an
expression, ``${ ... }``, what has a short form may be written short, and in a file that `extends` another
everything but `name` may be left out or be ``null``. It is narrower in nothing: it accepts what hflow does.

A file for `-f` is one without `hflow`, or with none of `extends`, `name` and `loop`.
"""

from __future__ import annotations

import json
from typing import Any

from hflow.graph.source.schema import GraphSpec
from hflow.graph.source.schema_values import NAME_PATTERN, REF_PATTERN
from hflow.graph.write.option_schema import EXPRESSION, Schema, with_options

VERSION = 1
_COMPUTED: Schema = {
    "type": "string",
    "pattern": r"^\s*\$\{.*\}\s*$",
    "description": "computed from params",
}
_SCALARS: Schema = {"type": ["string", "number", "boolean"]}
# The short forms of some mappings and lists.
_SHORT: dict[str, Schema] = {
    "UseSpec": {"type": "string", "description": "a model"},
    "SourceSpec": {"type": "string", "pattern": REF_PATTERN, "description": "node.port"},
    "MetricSpec": {"type": "string", "pattern": REF_PATTERN, "description": "node.port"},
    "HangSpec": {"const": False},
    "CheckpointSpec": {
        "anyOf": [{"type": "integer", "minimum": 0, "description": "steps"}, {"const": False}, EXPRESSION]
    },
    "SamplesSpec": {
        "anyOf": [{"type": "integer", "minimum": 0, "description": "steps"}, {"const": False}, EXPRESSION]
    },
    "ReplanSpec": {
        "anyOf": [{"type": "integer", "minimum": 0, "description": "steps"}, {"type": "boolean"}, EXPRESSION]
    },
}
_NAME: Schema = {"type": "string", "pattern": NAME_PATTERN}
_PARTIAL = "Partial"  # prefix of definitions for files that extend another


def json_schema() -> Schema:
    """The schema as plain data; its keys come in a fixed order."""
    made = GraphSpec.model_json_schema(by_alias=True, ref_template="#/definitions/{model}")
    whole = {**made.pop("$defs"), "GraphSpec": made}
    definitions = {name: _widened(schema) for name, schema in whole.items()}
    partial = {_PARTIAL + name: _optional(schema) for name, schema in definitions.items()}
    child = partial[f"{_PARTIAL}GraphSpec"]
    partial[f"{_PARTIAL}File"] = {**child}
    child["required"] = ["hflow", "extends", "name"]
    for name in list(definitions):
        definitions[name] = with_options(name, definitions[name], partial=False)
        partial[_PARTIAL + name] = with_options(name, partial[_PARTIAL + name], partial=True)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"hflow graph file, version {VERSION}",
        "type": "object",
        "if": {"required": ["hflow"], "anyOf": [{"required": [key]} for key in ("extends", "name", "loop")]},
        "then": {
            "if": {"required": ["extends"]},
            "then": {"$ref": f"#/definitions/{_PARTIAL}GraphSpec"},
            "else": {"$ref": "#/definitions/GraphSpec"},
        },
        "else": {"$ref": f"#/definitions/{_PARTIAL}File"},
        "definitions": dict(sorted((definitions | partial | {"Expression": _COMPUTED}).items())),
    }


def json_schema_text() -> str:
    return json.dumps(json_schema(), indent=2) + "\n"


def _widened(schema: Schema) -> Schema:
    """A schema by pydantic, as draft-07 and with what may stand in a file before it is read."""
    dropped = ("title", "discriminator", "default")
    out = {key: value for key, value in schema.items() if key not in dropped}
    for key in ("properties", "patternProperties"):
        if key in out:
            out[key] = {name: _property(name, sub) for name, sub in out[key].items()}
    for key in ("anyOf", "oneOf"):
        if key in out:
            out[key] = [_widened(sub) for sub in out[key]]
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), dict):
            out[key] = _widened(out[key])
    if "patternProperties" in out:
        out["additionalProperties"] = False
    is_number = out.get("type") in ("integer", "number", "boolean") and "const" not in out
    if is_number or "enum" in out:
        return {"anyOf": [out, EXPRESSION]}
    short = _SHORT.get(str(out.get("$ref", "")).rpartition("/")[2])
    return {"anyOf": [short, out]} if short else out


def _property(name: str, schema: Schema) -> Schema:
    if name == "after":
        return {"anyOf": [_NAME, _widened(schema)]}
    if name == "trackers":
        return {"anyOf": [schema["items"], _widened(schema)]}
    if not schema:  # a param
        return _SCALARS
    return _widened(schema)


def _optional(schema: Any, may_be_null: bool = False) -> Any:
    """A schema in which nothing is required, and every entry of a mapping may be null."""
    if isinstance(schema, list):
        return [_optional(part) for part in schema]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(schema, dict):
        return schema
    parts: Schema = {k: v for k, v in schema.items() if k not in ("required", "minProperties")}  # pyright: ignore
    out = {key: _optional_part(key, value) for key, value in parts.items()}
    if "oneOf" in out:  # without an `op` a node may be of several kinds
        out["anyOf"] = out.pop("oneOf")
    return {"anyOf": [out, {"type": "null"}]} if may_be_null and "const" not in out else out


def _optional_part(key: str, value: Any) -> Any:
    match key:
        case "properties" | "patternProperties":
            return {name: _optional(sub, may_be_null=True) for name, sub in value.items()}
        case "additionalProperties" if isinstance(value, dict):
            return _optional(value, may_be_null=True)
        case "$ref" if value != EXPRESSION["$ref"]:
            return value.replace("/definitions/", f"/definitions/{_PARTIAL}")
        case "anyOf" | "oneOf" | "items":
            return _optional(value)
        case _:
            return value
