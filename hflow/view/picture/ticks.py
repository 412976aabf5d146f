"""Round numbers along an axis."""

from __future__ import annotations

from math import ceil, floor, log10

SLACK = 1e-9  # a limit that misses a multiple by rounding alone still counts


def spacing(span: float, most: int) -> float:
    """The least 1, 2 or 5 times a power of ten of which at most `most` fit into `span` (> 0)."""
    rough = span / most
    magnitude = 10.0 ** floor(log10(rough))
    return next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - SLACK))


def ticks(low: float, high: float, most: int) -> list[float]:
    """The multiples of a round spacing from `low` to `high`: at most `most` + 1."""
    step = spacing(high - low, most)
    numbers = range(ceil(low / step - SLACK), floor(high / step + SLACK) + 1)
    return [float(f"{i * step:.12g}") for i in numbers]  # 3 * 0.1 is 0.3 to people
