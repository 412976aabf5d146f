"""Text tables of a given width, in which a name may be shortened and a number never is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Column = tuple[str, Literal["left", "right"]]
GAP = "  "
LEAST = 8  # a left column is not made narrower than this


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> str:
    """Lines of aligned cells under a line of column names.

    Left-justified cells hold names and end in an ellipsis where `width` is too small; right-justified
    cells hold numbers and stay whole, if need be beyond `width`.
    """
    lines = [[name for name, _ in columns], *rows]
    widths = _widths(columns, lines, width)
    return "\n".join(
        GAP.join(_cell(text, w, justify) for text, w, (_, justify) in zip(line, widths, columns)).rstrip()
        for line in lines
    )


def _widths(columns: Sequence[Column], lines: Sequence[Sequence[str]], width: int) -> list[int]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    shrinkable = [i for i, (_, justify) in enumerate(columns) if justify == "left"]
    excess = sum(widths) + len(GAP) * (len(columns) - 1) - width
    for _ in range(excess):
        widest = max(shrinkable, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= LEAST:
            break
        widths[widest] -= 1
    return widths


def _cell(text: str, width: int, justify: str) -> str:
    if justify == "right":
        return text.rjust(width)
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"
