"""What filters and methods may make of little: counted before they run.

Each function takes what the filter or method of its name takes, after the budget. What is not here takes, and
makes, about as much as its arguments are large, and these are counted anyway.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hflow.graph.templates.budget import BadTemplateError, Budget

Cost = Callable[..., None]
MAX_PRECISION = 300
_SPEC = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+))?.", re.DOTALL)


def _replace(budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old = str(value), str(old)
    budget.spend(characters=(text.count(old) if old else len(text) + 1) * len(str(new)))


def _width(budget: Budget, value: Any, width: int = 80, fill: Any = None) -> None:
    budget.spend(characters=width)


def _indent(budget: Budget, value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    step = len(width) if isinstance(width, str) else width
    budget.spend(characters=step * (len(str(value).splitlines()) + 1))


def _wordwrap(
    budget: Budget,
    value: str,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> None:
    longest = max(map(len, value.split()), default=0)
    budget.spend(characters=len(value) * len(wrapstring or "\n") + longest * longest // max(1, width))


def _format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    specs = list(_SPEC.finditer(str(value)))
    widths = [w for spec in specs for w in spec.group("width", "precision") if w]
    if any(not w.isdecimal() or len(w) > 6 for w in widths):
        raise BadTemplateError("a width in `%` is a number of at most six digits")
    size, _ = budget.weigh([*args, *kwargs.values()])
    budget.spend(characters=sum(map(int, widths)) + len(specs) * size)


def _round(budget: Budget, value: Any, precision: Any = 0, method: str = "common") -> None:
    if isinstance(precision, int) and abs(precision) > MAX_PRECISION:
        raise BadTemplateError(f"a precision of more than {MAX_PRECISION} digits")


def _batch(budget: Budget, value: Any, linecount: int, fill_with: Any = None) -> None:
    budget.spend(linecount if fill_with is not None else 0)


def _slice(budget: Budget, value: Any, slices: int, fill_with: Any = None) -> None:
    budget.spend(slices)


def _sort(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    size, _ = budget.weigh(value)
    budget.spend(size * len(value).bit_length())


def _unique(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    budget.spend(len(value) ** 2 // 100)  # at worst, all of them fall into one place of the set


def _sum(budget: Budget, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise BadTemplateError("`sum` adds numbers")


def _join_filter(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    budget.spend(characters=len(value) * len(str(d)))
    if attribute is None:
        _refuse_null(budget, value)


def _join_method(budget: Budget, value: str, parts: Any) -> None:
    budget.spend(characters=len(value) * len(parts))


def _tojson(budget: Budget, value: Any, indent: Any = None) -> None:
    size, depth = budget.weigh(value)
    step = len(indent) if isinstance(indent, str) else indent or 0
    budget.spend(characters=step * depth * size)


def _each(budget: Budget, value: Any, sought: Any = None, *args: Any) -> None:
    """Of what may look at all of `sought` at every place of `value`."""
    budget.spend(characters=len(str(value)) * len(str(sought)) if sought is not None else 0)


def _refuse_null(budget: Budget, parts: Any) -> None:
    for part in parts:
        if part is None:
            budget.text(part)


FILTER_COSTS: Mapping[str, Cost] = {
    "replace": _replace,
    "center": _width,
    "indent": _indent,
    "wordwrap": _wordwrap,
    "format": _format,
    "round": _round,
    "batch": _batch,
    "slice": _slice,
    "sort": _sort,
    "dictsort": _sort,
    "groupby": _sort,
    "unique": _unique,
    "sum": _sum,
    "join": _join_filter,
    "tojson": _tojson,
    "trim": _each,
}
METHOD_COSTS: Mapping[str, Cost] = {
    "replace": _replace,
    "join": _join_method,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rsplit", "rpartition", "rfind", "rindex"), _each),
}
