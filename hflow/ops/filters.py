"""Which prompts are worth training on."""

from __future__ import annotations

from torch import Tensor

from hflow.ops.op import op


@op("score: f32[prompts*group] -> keep: bool[prompts]", min_group=2)
def mixed_groups(score: Tensor) -> Tensor:
    """Prompts whose responses do not all score the same (dynamic sampling of DAPO, arXiv:2503.14476).

    Where all do, group-relative advantages are 0, and the prompt teaches nothing.

    Args:
        score: ``[prompts, group]``.

    Returns:
        bool ``[prompts]``. A group of one is never mixed.
    """
    return score.amax(1) != score.amin(1)
