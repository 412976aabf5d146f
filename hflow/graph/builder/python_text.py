"""Python calls and values as text, over several lines where one is too long."""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, cast

WIDTH = 100
INDENT = "    "


class Code(str):
    """Python as it stands, where other texts are put in quotes."""


Arguments = list[tuple[str, Any]]  # a keyword, or "", and a value


def call(head: str, arguments: Arguments, depth: int = 0, end: str = "") -> list[str]:
    """``head(...)end`` on one line if there is room at that depth, else an argument on each."""
    texts = [f"{_before(name)}{literal(value)}{_behind(name)}" for name, value in arguments]
    line = f"{head}({', '.join(texts)}){end}"
    if len(INDENT) * depth + len(line) <= WIDTH:
        return [line]
    return [
        f"{head}(",
        *_indented(_lines(_before(n), v, _behind(n), depth + 1) for n, v in arguments),
        f"){end}",
    ]


def literal(value: Any) -> str:
    """On one line, texts in double quotes."""
    match value:
        case Code():
            return value
        case str():
            return json.dumps(value, ensure_ascii=False)
        case Mapping():
            entries = (
                f"{literal(key)}: {literal(each)}" for key, each in cast("Mapping[str, Any]", value).items()
            )
            return f"{{{', '.join(entries)}}}"
        case list() | tuple():
            return f"[{', '.join(map(literal, cast('Sequence[Any]', value)))}]"
        case float() if not isfinite(value):
            return f'float("{value}")'
        case _:
            return repr(value)


def _lines(before: str, value: Any, behind: str, depth: int) -> list[str]:
    """A value at some depth, an entry on each line where it is too long for one."""
    line = f"{before}{literal(value)}{behind}"
    if len(INDENT) * depth + len(line) < WIDTH or not value or not isinstance(value, (Mapping, list, tuple)):
        return [line]
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value).items()
        parts = (_lines(f"{literal(key)}: ", each, "", depth + 1) for key, each in entries)
        return [f"{before}{{", *_indented(parts), f"}}{behind}"]
    parts = (_lines("", each, "", depth + 1) for each in cast("Sequence[Any]", value))
    return [f"{before}[", *_indented(parts), f"]{behind}"]


def _indented(parts: Iterator[list[str]]) -> Iterator[str]:
    """A comma behind each part."""
    for *lines, last in parts:
        yield from (f"{INDENT}{line}" for line in [*lines, f"{last},"])


def _before(name: str) -> str:
    if not name:
        return ""
    return f"{name}=" if _is_keyword(name) else f"**{{{literal(name)}: "


def _behind(name: str) -> str:
    return "" if not name or _is_keyword(name) else "}"


def _is_keyword(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
