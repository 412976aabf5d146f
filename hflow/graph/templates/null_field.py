"""Values of a row that no text stands for: null, a number that is not finite, bytes.

Jinja would write them as Python does, so that a model would learn ``None`` and ``nan``. Here a template that
writes one fails; one that only asks (``{% if hint %}``, ``hint is none``, ``hint | default('')``) does not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jinja2 import StrictUndefined


class Unwritable(StrictUndefined):
    """Stands in for such a value. Everything that would take its text raises UndefinedError."""

    __slots__ = ()

    @property
    def is_null(self) -> bool:
        return self._undefined_obj is None

    def __repr__(self) -> str:
        return str(self)  # raises: the text of a list is made of this

    def __bool__(self) -> bool:
        return not self.is_null

    def __eq__(self, other: object) -> bool:
        return self.is_null and is_null(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(type(self))


def guarded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for a template, its unwritable values replaced."""
    return {field: _guarded(value, field) for field, value in row.items()}


def unwritable(value: Any) -> str:
    """What such a value is; empty for all others."""
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{float(value)}, no finite number"
    return "bytes, no text" if isinstance(value, bytes) else ""


def is_null(value: object) -> bool:
    return value is None or (isinstance(value, Unwritable) and value.is_null)


def _guarded(value: Any, field: str) -> Any:
    if problem := unwritable(value):
        return Unwritable(hint=f"field `{field}` is {problem}", obj=value)
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        return {key: _guarded(inner, f"{field}.{key}") for key, inner in entries.items()}
    if isinstance(value, list | tuple):
        items = enumerate(cast("Sequence[Any]", value))
        inside = [_guarded(inner, f"{field}[{index}]") for index, inner in items]
        return tuple(inside) if isinstance(value, tuple) else inside
    return value


def dumps(value: Any, **options: Any) -> str:
    """For ``tojson``, which has a word for null and none for what else is no text."""
    return json.dumps(value, default=_json, allow_nan=False, **options)


def _json(value: Any) -> None:
    if not is_null(value):
        str(value)  # raises UndefinedError with the field's name
        raise TypeError(f"{type(value).__name__} is nothing that JSON has")
