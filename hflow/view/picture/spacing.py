"""Places on a line that keep order and distances, as near as possible to where they want to be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def spaced(wanted: Sequence[float], weights: Sequence[float], distances: Sequence[float]) -> list[float]:
    """The y that minimise the sum of ``weights * (y - wanted)**2`` with ``y[i + 1] - y[i] >= distances[i]``.

    Without the distances that is isotonic regression, which pooling adjacent violators solves exactly
    (Barlow, Bartholomew, Bremner & Brunk 1972); distances only shift what each place wants.

    Args:
        distances: one fewer than `wanted`.
    """
    shifts = [0.0, *accumulate(distances)]
    blocks: list[tuple[float, float, int]] = []  # mean, weight and length of places that stand together
    for want, weight, shift in zip(wanted, weights, shifts):
        block = (want - shift, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            block = _pooled(blocks.pop(), block)
        blocks.append(block)
    level = [mean for mean, _, length in blocks for _ in range(length)]
    return [mean + shift for mean, shift in zip(level, shifts)]


def _pooled(a: tuple[float, float, int], b: tuple[float, float, int]) -> tuple[float, float, int]:
    weight = a[1] + b[1]
    return (a[0] * a[1] + b[0] * b[1]) / weight, weight, a[2] + b[2]
