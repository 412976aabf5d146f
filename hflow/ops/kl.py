"""Estimates of the divergence of one policy from another, from samples."""

from __future__ import annotations

from torch import Tensor

from hflow.ops.log_ratio import bounded

KINDS = ("k1", "k2", "k3")


def estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """KL(policy || reference) at each token, from tokens that the policy sampled.

        d = ref_logprobs - logprobs
        k1 = -d                   unbiased, of either sign
        k2 = d^2 / 2              biased, >= 0; as a loss its gradient is that of KL(policy || reference)
        k3 = exp(d) - d - 1       unbiased, >= 0; as a loss its gradient is that of KL(reference || policy);
                                  d is held within +-20

    As a loss, k1 has a gradient of expectation 0: it belongs into rewards. Source: Schulman,
    "Approximating KL Divergence", joschu.net/blog/kl-approx.html.

    Args:
        logprobs, ref_logprobs: ``[rows, T]``, of the same tokens.
        mask: bool ``[rows, T]``, the tokens that count.

    Returns:
        ``[rows, T]``, 0 outside the mask.

    Raises:
        ValueError: for another `kind`.
    """
    log_ratio = (ref_logprobs - logprobs).masked_fill(~mask, 0)
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        log_ratio = bounded(log_ratio)
        return log_ratio.exp() - log_ratio - 1
    raise ValueError(f"kl is `{kind}`; it is one of {', '.join(KINDS)}")
