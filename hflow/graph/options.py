"""What a node's `with:` may hold: names, kinds, bounds and defaults."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from hflow.graph.foreign.lookup import help_for_unknown, own_keys

Kind = Literal[
    "int", "float", "bool", "str", "mapping", "floats", "texts", "ints", "tools", "dataset", "switch"
]
REQUIRED: Any = ...  # the default of an option that has none
INT64 = 2**63  # whole numbers are smaller than this

_NOUNS: dict[Kind, str] = {
    "int": "an integer",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a string",
    "mapping": "a mapping",
    "floats": "finite numbers",
    "texts": "a string or a list of strings",
    "ints": "a list of integers",
    "tools": "a string or a list of mappings",
    "dataset": "a string, a list of strings or a list of mappings",
    "switch": "true, false or a mapping",
}


@dataclass(frozen=True)
class Option:
    """One key of `with:`. Bounds hold for every number of a list; `length` is that of the list. An
    `optional` one has no default, and a node that does not write it does not have it."""

    name: str
    kind: Kind
    default: Any = REQUIRED
    least: float | None = None
    above: float | None = None
    below: float | None = None
    length: int | None = None
    choices: tuple[Any, ...] = ()
    nullable: bool = False
    optional: bool = False
    most: float | None = None

    @property
    def expectation(self) -> str:
        """What the value must be, for messages: ``an integer > 0``."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        count = f"{self.length} " if self.length else ""
        limits = [(">=", self.least), (">", self.above), ("<", self.below), ("<=", self.most)]
        bounds = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
        return f"{count}{_NOUNS[self.kind]} {bounds}".strip() + (" or null" if self.nullable else "")

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.nullable
        if self.choices:
            return any(value == c and type(value) is type(c) for c in self.choices)
        if self.kind == "texts":
            texts = cast("list[Any]", value) if isinstance(value, list) else [value]
            return bool(texts) and all(isinstance(t, str) for t in texts)
        if self.kind == "tools":
            tools = cast("list[Any]", value) if isinstance(value, list) else []
            return isinstance(value, str) or (bool(tools) and all(isinstance(t, dict) for t in tools))
        if self.kind == "dataset":
            parts = cast("list[Any]", value) if isinstance(value, list) else [value]
            alike = isinstance(value, list) and all(isinstance(p, dict) for p in parts)
            return bool(parts) and (alike or all(isinstance(p, str) for p in parts))
        if self.kind == "floats":
            numbers = cast("list[Any]", value) if isinstance(value, list) else []
            fits = isinstance(value, list) and self.length in (None, len(numbers))
            return fits and all(_is_number(n) and self._within(n) for n in numbers)
        if self.kind == "ints":
            numbers = cast("list[Any]", value) if isinstance(value, list) else []
            return bool(numbers) and all(_is_number(n, integer=True) and self._within(n) for n in numbers)
        if self.kind in ("int", "float"):
            return _is_number(value, self.kind == "int") and self._within(value)
        if self.kind == "switch":
            return isinstance(value, bool | dict)
        return isinstance(value, {"bool": bool, "str": str, "mapping": dict}[self.kind])

    def convert(self, value: Any) -> Any:
        """An accepted value in the option's own kind (an integer is a fine float)."""
        if value is None or self.choices:
            return value
        if self.kind == "floats":
            return [float(v) for v in value]
        return float(value) if self.kind == "float" else value

    def _within(self, value: float) -> bool:
        if self.kind in ("int", "ints") and abs(value) >= INT64:
            return False
        if self.least is not None and value < self.least:
            return False
        if self.above is not None and value <= self.above:
            return False
        if self.most is not None and value > self.most:
            return False
        return self.below is None or value < self.below


@dataclass(frozen=True)
class OptionProblem:
    """`option` is None when the key is missing from `with:`, or from what stands at `within` there: the keys
    and places of lists that lead to it."""

    code: str
    message: str
    option: str | None
    help: str = ""
    within: tuple[str | int, ...] = ()


def defaults(options: Sequence[Option], written: Mapping[str, Any]) -> dict[str, Any]:
    """Valid values by name: as written, else the default. Bad and missing ones are left out."""
    out: dict[str, Any] = {}
    for option in options:
        if option.name not in written:
            if option.default is not REQUIRED:
                out[option.name] = option.default
        elif option.accepts(written[option.name]):
            out[option.name] = option.convert(written[option.name])
    return out


def problems(options: Sequence[Option], written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    """HF211 for unknown names, HF212 for bad values, HF101 for missing ones."""
    known = {o.name: o for o in options}
    for name, value in written.items():
        if name not in known:
            help_ = help_for_unknown(name, known, "options")
            yield OptionProblem("HF211", f"unknown option `{name}`", name, help_)
        elif not known[name].accepts(value):
            huge = isinstance(value, int) and abs(value) >= INT64
            expected = f"less than {INT64}" if huge else known[name].expectation
            message = f"`{name}` must be {expected}, got {brief(value)}"
            yield OptionProblem("HF212", message, name, spelling_help(known[name].kind, value))
    unknown = [name for name in written if name not in known]
    meant = {key for name in unknown for key in own_keys(name)}
    for option in options:
        misspelt = option.name in meant or difflib.get_close_matches(option.name, unknown, n=1)
        is_required = option.default is REQUIRED and not option.optional
        if is_required and option.name not in written and not misspelt:
            message = f"missing option `{option.name}`"
            yield OptionProblem("HF101", message, None, f"`{option.name}` is {option.expectation}")


_NUMBER = re.compile(r"[-+]?\d[\d.]*([eE][-+]?\d+)?")
_TRUTHS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def spelling_help(kind: str, value: Any) -> str:
    """Help on a value that was meant to be of `kind` and is something else in YAML 1.2."""
    text = value if isinstance(value, str) else ""
    if kind in ("bool", "switch") and (truth := _TRUTHS.get(text.lower())):
        return f"write `{truth}`: in YAML 1.2, `{text}` is a text"
    if kind == "int" and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"write `{int(value)}`: with a point or an exponent it is no integer"
    if kind in ("int", "float") and text.isidentifier():
        return f'if `{text}` is a param, write `"${{ {text} }}"`'
    if kind in ("int", "float") and _NUMBER.fullmatch(text):
        return "a number stands without quotes"
    return ""


def brief(value: Any) -> str:
    """A value for a message, cut to a readable length."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "a mapping"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _is_number(value: Any, integer: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return integer
