"""Values as YAML text that `hflow.graph.source.document` reads back as the same values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hflow.graph.source.document import resolve

WIDTH = 110  # columns of a line with brackets; longer ones become blocks

# Words that need no quotes; a comma would end a value within `[ ]` or `{ }`.
_WORD = r"[\w./:=+()@'-]*[\w./=+()@'-]"
_IN_FLOW = re.compile(rf"(?=[\w./]){_WORD}(?: {_WORD})*")
_IN_BLOCK = re.compile(rf"(?=[\w./]){_WORD},?(?: {_WORD},?)*")
_KEY = re.compile(r"[\w][\w.@-]*")


def scalar(value: Any, in_flow: bool = True) -> str:
    """A string, number, boolean or None on one line; quoted only where it has to be."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    plain = (_IN_FLOW if in_flow else _IN_BLOCK).fullmatch(text) and isinstance(resolve(text), str)
    return text if plain else quoted(text)


def quoted(text: str) -> str:
    """Text in double quotes, everything that is not printable escaped."""
    body = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else _escape(c) for c in body)


def key(text: str) -> str:
    """Text as the key of a mapping."""
    return text if _KEY.fullmatch(text) else quoted(text)


def flow(value: Any) -> str:
    """Any value on one line: ``{a: 1, b: [x, y]}``."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key(str(k))}: {flow(v)}" for k, v in value.items()) + "}"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(flow, value)) + "]"  # pyright: ignore[reportUnknownArgumentType]
    return scalar(value)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    return re.sub(r"e([-+]?)0*", lambda m: f"e{m[1].removeprefix('+')}", repr(value))


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
