"""Differences of log-probs, bounded so that their exponential is finite."""

from __future__ import annotations

from torch import Tensor

BOUND = 20.0  # in nats, as in verl: e^20 is 5e8, while float32 overflows at e^89


def bounded(difference: Tensor) -> Tensor:
    """`difference` held within +-`BOUND`; its gradient is 0 beyond.

    Where exp overflows, a clip or a minimum that follows does not help: the gradient is 0 * inf, which is
    NaN.
    """
    return difference.clamp(-BOUND, BOUND)


def beyond(difference: Tensor) -> Tensor:
    """bool: where `bounded` holds a difference, so that it has no gradient."""
    return difference.abs() > BOUND
