"""Baselines that are carried from step to step."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor

from hflow.ops.op import op


@op("score: f32[rows], baseline: f32[] -> advantages: f32[rows], baseline: f32[]", whole_batch=True)
def moving_baseline(
    score: Tensor, baseline: Tensor, *, momentum: Annotated[float, Ge(0), Le(1)] = 0.9
) -> tuple[Tensor, Tensor]:
    """The score less a moving average of earlier scores (reinforcement baseline, Williams 1992).

        advantage = score - b
        b' = momentum * b + (1 - momentum) * mean score

    The baseline of a batch does not depend on that batch, so it adds no bias.

    Args:
        score: ``[rows]``, all rows of the batch.
        baseline: ``[]``, b, of the step before.

    Returns:
        Advantages ``[rows]``, and b', ``[]``.
    """
    before = baseline.double()
    # As a step towards the mean: where that is the old baseline, exactly this stays.
    after = before + (1 - momentum) * (score.double().mean() - before)
    return score - baseline, after.to(baseline.dtype)
