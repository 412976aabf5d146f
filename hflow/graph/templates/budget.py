"""What rendering one row may take, counted in operations and characters.

Not in seconds, which differ from machine to machine: workers that render the same row must agree on
whether it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from numbers import Number
from typing import Any, cast

from jinja2 import Undefined

MAX_OPERATIONS = 10**6  # steps of loops, and items of lists that are gone through
MAX_CHARACTERS = 10**7  # of all texts that are read or made, those in between included
MAX_DEPTH = 100  # lists and mappings inside each other
MAX_BITS = 10_000  # of a whole number

_PLAIN = frozenset((str, int, float, bool, type(None)))
_ATOMS = (Number, Decimal, date, time, timedelta, type(None))


class BadTemplateError(Exception):
    """Why a template is refused, or why it cannot be rendered, and what to do about it."""

    def __init__(self, message: str, help: str = ""):
        super().__init__(message)
        self.message = message
        self.help = help


class Budget:
    """What is left for the row that is being rendered; `most` characters at first."""

    def __init__(self, most: int = MAX_CHARACTERS) -> None:
        self._most = most
        self.operations = 0
        self.characters = 0

    def spend(self, operations: int = 0, characters: int = 0) -> None:
        """Count, before the work is done. Raises BadTemplateError when it is too much."""
        self.operations += max(0, operations)
        self.characters += max(0, characters)
        if self.operations > MAX_OPERATIONS:
            raise BadTemplateError(f"more than {MAX_OPERATIONS} operations", self._limits)
        if self.characters > self._most:
            raise BadTemplateError(f"texts of more than {self._most} characters in all", self._limits)

    @property
    def _limits(self) -> str:
        return (
            f"a row's template may take {MAX_OPERATIONS} operations, and {self._most} characters of texts,"
            " those in between included"
        )

    def weigh(self, value: Any) -> tuple[int, int]:
        """Count every item and character inside a value: those who read it may go through all of them.

        Returns:
            How many there are, and how many lists and mappings are inside each other.

        Raises:
            BadTemplateError: too much, or a value of a kind that has no text that is the same everywhere
                (a set, an object whose text is its address).
        """
        size = depth = 0
        level: list[Any] = [value]
        while level:
            length = sum(len(item) for item in level if isinstance(item, str))
            size += len(level) + length
            self.spend(1, length)
            holders = [item for item in level if type(item) not in _PLAIN]
            level = []
            for holder in holders:
                inner = _inside(holder)
                self.spend(len(inner))
                level += inner
            depth += bool(level)
            if depth > MAX_DEPTH:
                raise BadTemplateError(f"lists and mappings nested deeper than {MAX_DEPTH} levels")
        return size, depth

    def spend_operation(self, operator: str, left: Any, right: Any) -> None:
        """Count ``left operator right`` before it is computed."""
        if operator == "+":
            self.spend(items(left) + items(right), letters(left) + letters(right))
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    self.spend(items(repeated) * times, letters(repeated) * times)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            powers = right if operator == "**" else 1
            if left.bit_length() * powers + right.bit_length() * (operator == "*") > MAX_BITS:
                raise BadTemplateError(f"a whole number of more than {MAX_BITS} bits")

    def number(self, value: Any) -> Any:
        """The same value, unless it is a number that is too large, or not real."""
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise BadTemplateError(f"a whole number of more than {MAX_BITS} bits")
        if isinstance(value, complex):
            raise BadTemplateError("a number that is not real")
        return value

    def text(self, value: Any) -> str:
        """What `{{ value }}` writes.

        Raises:
            BadTemplateError: of null and of numbers that are none, which would be learned as the texts `None`
                and `nan`.
            UndefinedError: of what is not defined.
        """
        if isinstance(value, Undefined):
            return str(value)  # raises; its message names what is missing
        if value is None:
            raise BadTemplateError(
                "a null would be written as `None`", "say what to write instead: `{{ x or '' }}`"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise BadTemplateError(f"`{value}` would be written, which is no number")
        self.weigh(value)
        return str(value)


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        return [*entries, *entries.values()]
    if isinstance(value, list | tuple):
        return cast("list[Any]", value)
    if isinstance(value, (str, Undefined, *_ATOMS)):
        return []
    raise BadTemplateError(f"a template cannot use a value of type `{type(value).__name__}`", _KINDS)


_KINDS = "values are texts, numbers, dates, null, lists and mappings"


def items(value: Any) -> int:
    """Of a list, tuple or mapping; 0 of anything else."""
    return len(cast("list[Any]", value)) if isinstance(value, list | tuple | dict) else 0


def letters(value: Any) -> int:
    """Of a text; 0 of anything else."""
    return len(value) if isinstance(value, str) else 0
