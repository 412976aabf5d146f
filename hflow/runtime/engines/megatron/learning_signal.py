"""Whether an update, or a token of it, has something to learn from, or rounding only.

Where nothing is to be learned, as when all rewards are equal, what is left of a gradient is rounding. Adam
divides by its size: it would change the weights at full learning rate, in a direction that every plan rounds
otherwise. Whether there is a signal is therefore asked of the loss itself, token by token, before the weights
of the model come in: of its slope with respect to what the model computed, and of how much that slope changes
when this is rounded otherwise.

In an update that is made, Adam would do the same to weights that nothing but rounding reaches, as embeddings
of tokens in rows from which nothing is to be learned. So such slopes are left out of the gradient, in every
dtype by the measure of float32: what that calls rounding is too little to be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import grad

# How far apart the log-probs of one token may be that two layouts compute, in nats. Measured (tp 1, 2 and 4;
# random models of 4 to 8 layers and hidden size 128 to 1024, with weights of one to five times the usual
# size): at most 88 float32 epsilons in f32, and 15 bf16 epsilons in bf16, where logits are rounded too.
ROUNDING: dict[torch.dtype, float] = {
    torch.float32: 2**7 * torch.finfo(torch.float32).eps,
    torch.bfloat16: 2**4 * torch.finfo(torch.bfloat16).eps,
}
# Numbers in units of the reward, given by a head that computes in float32. Their rounding is proportional to
# them, and in every dtype that of float32: 2**-3 of their level would call a critic trained that is 12 % off,
# and two scores equal that a reward model has shifted alike.
RELATIVE = frozenset({"values", "score"})


def carries_signal(loss: Tensor, computed: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Whether some slope c of `loss` is more than what rounding of the model's numbers x makes of it:

        |c| > rounding * |h|,        h = dc / dx

    So a Newton step on x, c / h, is longer than the rounding of x. A loss that is linear in x (h = 0) carries
    signal where c is not 0; one that cannot be differentiated twice counts as linear. Where c depends on the
    other tokens of the row too, their parts come into h with alternating signs: errors of many tokens cancel,
    and their sum would call a preference between responses of unequal length rounding.

    Args:
        loss: of a micro-batch, a scalar; its graph is kept.
        computed: what it reads of the model, ``[rows, longest]`` each, or ``[rows]``.
        dtype: the model's.

    Returns:
        bool, a scalar.
    """
    return _carried(_slopes(loss, computed), dtype, loss)


def leave_out_rounding(loss: Tensor, computed: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """As `carries_signal`; and from now on the gradient of `loss` is 0 with respect to those of the numbers
    at which its slope is no more than rounding in float32."""
    slopes = _slopes(loss, computed)
    for slope in slopes:
        slope.at.register_hook(_only(slope.above(torch.float32)))
    return _carried(slopes, dtype, loss)


@dataclass(frozen=True)
class _Slope:
    """Of a loss at the numbers `at`: its `size` |c|, and what a rounding by 1, `relative` to the numbers or
    not, makes of it; of one shape."""

    at: Tensor
    size: Tensor
    of_rounding: Tensor
    relative: bool

    def above(self, dtype: torch.dtype) -> Tensor:
        """bool, also true where a slope is no number: such a one must not be hidden."""
        return ~(self.size <= self.rounding(dtype))

    def rounding(self, dtype: torch.dtype) -> Tensor:
        return ROUNDING[torch.float32 if self.relative else dtype] * self.of_rounding


def _carried(slopes: list[_Slope], dtype: torch.dtype, loss: Tensor) -> Tensor:
    found = [(slope.size > slope.rounding(dtype)).any() for slope in slopes]
    return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=loss.device)


def _only(kept: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient.where(kept, 0.0)


def _slopes(loss: Tensor, computed: Mapping[str, Tensor]) -> list[_Slope]:
    given = {name: x for name, x in computed.items() if x.requires_grad}
    slopes = grad(loss, list(given.values()), create_graph=True, allow_unused=True)
    found = {name: c for name, c in zip(given, slopes) if c is not None}
    curvatures = _curvatures(list(found.values()), [given[name] for name in found])
    made: list[_Slope] = []
    for (name, slope), curvature in zip(found.items(), curvatures):
        relative = name in RELATIVE
        scale = given[name].detach().abs() if relative else 1.0
        made.append(_Slope(given[name], slope.detach().abs(), scale * curvature, relative))
    return made


def _curvatures(slopes: list[Tensor], at: list[Tensor]) -> list[Tensor]:
    """|dc / dx| of every slope, zeros where it has none."""
    nothing = [torch.zeros_like(x) for x in at]
    curved = [slope for slope in slopes if slope.requires_grad]
    if not curved:
        return nothing
    total = sum((slope * _signs(slope)).sum() for slope in curved)
    assert isinstance(total, Tensor)
    try:
        found = grad(total, at, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a function of the user's that has no second derivative
        return nothing
    # One that is not finite, like that of a root at 0, must not hide a slope.
    return [zero if h is None else h.abs().where(h.isfinite(), 0.0) for h, zero in zip(found, nothing)]


def _signs(values: Tensor) -> Tensor:
    """1, -1, 1, … along the tokens of a row, or along the rows."""
    return 1.0 - 2.0 * (torch.arange(values.shape[-1], device=values.device) % 2)
