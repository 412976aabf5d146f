"""From losses per token to the loss of a minibatch."""

from __future__ import annotations

from torch import Tensor

MODES = ("token_mean", "sequence_mean", "sequence_sum")


def token_weights(mask: Tensor, mode: str, global_tokens: float, global_rows: float) -> Tensor:
    """Weights under which per-token losses sum to the loss of the whole minibatch.

    - ``token_mean``: mean over all tokens (DAPO, arXiv:2503.14476): 1 / global_tokens;
    - ``sequence_mean``: mean over rows of the mean over a row's tokens (GRPO, arXiv:2402.03300):
      1 / (tokens in the row * global_rows);
    - ``sequence_sum``: mean over rows of the sum over a row's tokens (Dr. GRPO, arXiv:2503.20783):
      1 / global_rows.

    Rows without tokens are not among the rows (as in verl's `agg_loss`): a response that is masked out as a
    whole leaves the loss as if it had not been sampled.

    Args:
        mask: bool ``[rows, T]``, the tokens that count; any part of the minibatch.
        global_tokens: tokens that count in the whole minibatch, on all ranks.
        global_rows: rows with tokens that count, of the whole minibatch, on all ranks.

    Returns:
        float32 ``[rows, T]``, 0 outside the mask; parts of a minibatch may be weighted separately.

    Raises:
        ValueError: for another `mode`.
    """
    if mode == "token_mean":
        return mask.float() / max(global_tokens, 1.0)
    if mode == "sequence_sum":
        return mask.float() / max(global_rows, 1.0)
    if mode == "sequence_mean":
        in_row = mask.sum(1, keepdim=True).clamp(min=1)
        return mask.float() / in_row / max(global_rows, 1.0)
    raise ValueError(f"aggregate is `{mode}`; it is one of {', '.join(MODES)}")
