"""Log-probabilities and entropy of tokens under logits that are split over the vocabulary.

z are the logits divided by the temperature, computed in float32:

    log p(token) = z[token] - log sum exp z          H = log sum exp z - sum p z

With kept sets both sums are over a token's set only, so log-probs and entropy are those of the truncated
distribution, whatever the logits of today would leave:

    log p(token) = z[token] - log sum over the kept exp z

Softmax and its gradient are made for a chunk of tokens at a time, so that the float32 values of a
large vocabulary are never in memory for the whole batch; between forward and backward only the logits
themselves (in the model's dtype) are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

CHUNK_BYTES = 64 * 2**20
FAR = -1e9  # in the place of a logit that another rank has, or none: finite, so that 0 * FAR is 0


def log_probs(
    logits: Tensor,
    targets: Tensor,
    group: ProcessGroup,
    temperature: float = 1.0,
    entropy: bool = True,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy of the distributions, with gradients to `logits`.

    Args:
        logits: ``[tokens, vocab / tp]``, this rank's part of the vocabulary.
        targets: int64 ``[tokens]``, ids of the whole vocabulary, the same on all ranks of `group`.
        group: the tensor-parallel group; collective over it.
        entropy: leave it out (zeros, without gradient) where False.
        kept: sets of ids that contain the targets, int64 ``[tokens, largest set]``, padded with -1; the
            distribution is over these. Of an empty set both numbers are 0.

    Returns:
        float32 ``[tokens]`` twice, the same on all ranks of `group`.
    """
    width = logits.shape[1]
    local = targets - group.rank() * width
    mine = (local >= 0) & (local < width)
    if kept is None:
        return _LogProbs.apply(logits, local.clamp(0, width - 1), mine, group, temperature, entropy)
    inside = kept - group.rank() * width
    here = (kept >= 0) & (inside >= 0) & (inside < width)
    chosen = logits.gather(1, inside.clamp(0, width - 1)).masked_fill(~here, FAR)
    place = (kept == targets[:, None]).to(torch.uint8).argmax(1)
    found = _LogProbs.apply(chosen, place, mine, group, temperature, entropy)
    sampled = (kept >= 0).any(1)
    return found[0].where(sampled, 0.0), found[1].where(sampled, 0.0)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: Tensor,
        local: Tensor,
        mine: Tensor,
        group: ProcessGroup,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """`local`: the column of each target, where it is `mine`, on this rank."""
        count = len(logits)
        top = torch.full((count,), -torch.inf, device=logits.device)
        for part in _chunks(logits):
            top[part] = logits[part].amax(-1).float() / temperature
        _reduce(top, ReduceOp.MAX, group)
        sums = torch.zeros(3, count, device=logits.device)  # sum exp z', z'[token], sum z' exp z'
        for part in _chunks(logits):
            z = (logits[part].float() / temperature).sub_(top[part, None])
            sums[1, part] = z.gather(1, local[part, None]).squeeze(1) * mine[part]
            e = z.exp()
            sums[0, part] = e.sum(-1)
            if entropy:
                sums[2, part] = (e * z).sum(-1)
        _reduce(sums, ReduceOp.SUM, group)
        log_sum = sums[0].log()
        uncertainty = log_sum - sums[2] / sums[0] if entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(logits, local, mine, top + log_sum, uncertainty)
        ctx.temperature, ctx.entropy = temperature, entropy
        return sums[1] - log_sum, uncertainty

    @staticmethod
    def backward(ctx: Any, to_log_prob: Tensor, to_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, local, mine, log_total, uncertainty = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for part in _chunks(logits):
            log_p = (logits[part].float() / ctx.temperature).sub_(log_total[part, None])
            p = log_p.exp()
            g = p * -to_log_prob[part, None]
            g.scatter_add_(1, local[part, None], (to_log_prob * mine)[part, None])
            if ctx.entropy:
                g -= p * (log_p + uncertainty[part, None]) * to_entropy[part, None]
            gradient[part] = g.div_(ctx.temperature)
        return gradient, None, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    """Consecutive parts of the tokens whose float32 logits fill at most `CHUNK_BYTES`."""
    count, width = logits.shape
    size = max(1, CHUNK_BYTES // (4 * width))
    return [slice(start, start + size) for start in range(0, count, size)]


def _reduce(values: Tensor, op: Any, group: ProcessGroup) -> None:
    if group.size() > 1:
        all_reduce(values, op=op, group=group)
