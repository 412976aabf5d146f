"""Draws without replacement in which some rows come sooner than others: functions of a key and weights.

One row after the other is drawn, each with a probability that is its share of the weights of those that are
left. Equally, every row waits for a time of its own, exponential with its weight as the rate, and those that
come first are drawn (Efraimidis and Spirakis 2006, doi:10.1016/j.ipl.2005.11.003; adding Gumbel noise to the
logarithms of weights is the same). A row's time depends on the key, its number and its weight alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hflow.runtime.permutation import hashes

LN_2 = float.fromhex("0x1.62e42fefa39efp-1")
_TERMS = 18  # of the series: the next one is below 2^-60 of the sum


def draw(weights: NDArray[np.float64], count: int, key: str) -> NDArray[np.int64]:
    """The numbers of `count` distinct rows, in the order in which they are drawn.

    Args:
        weights: float64 ``[rows]``, above 0; only their ratios matter.
        key: of the random numbers; another key gives another draw.
    """
    bits = hashes(len(weights), key) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), never its ends
    return np.argsort(-log(uniform) / weights, kind="stable")[:count]


def log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithms of positive numbers, by sums and products alone, which are rounded alike on every
    machine; those of libraries are not. Exact to some 1e-16 of the values' own size, or absolutely."""
    mantissa, exponent = np.frexp(values)  # in [0.5, 1)
    is_small = mantissa < 2.0**-0.5
    mantissa, exponent = np.where(is_small, 2 * mantissa, mantissa), exponent - is_small
    z = (mantissa - 1) / (mantissa + 1)  # log m = 2 (z + z^3/3 + z^5/5 + ...), |z| <= 0.172
    square, total = z * z, np.zeros_like(z)
    for term in range(_TERMS, -1, -1):
        total = total * square + 1 / (2 * term + 1)
    return exponent * LN_2 + 2 * z * total
