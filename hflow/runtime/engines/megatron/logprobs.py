"""Log-probabilities and entropy of tokens under logits that are split over the vocabulary.

z are the logits divided by the temperature, computed in float32:

    log p(token) = z[token] - log sum exp z          H = log sum exp z - sum p z

With kept sets both sums are over a token's set only, so log-probs and entropy are those of the truncated
distribution, whatever the logits of today would leave:

    log p(token) = z[token] - log sum over the kept exp z

Here the logits are kept between forward and backward, in the model's dtype; `predicted` may do without.
Softmax and its gradient are made for a chunk of tokens at a time, of kept sets that may be large: never more
than two float32 copies of a chunk. Kernels, for CUDA and for CPUs, make them without a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from hflow.runtime.engines.megatron.cpu_kernels import logprobs as cpu_kernels
from hflow.runtime.engines.megatron.cpu_kernels.library import runs_on

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
    columns, mine = on_rank(targets, width, group)
    if kept is None:
        return _LogProbs.apply(logits, columns, mine, group, temperature, entropy)
    inside, here = on_rank(kept, width, group)
    chosen = logits.gather(1, inside).masked_fill(~here, FAR)
    return log_probs_of_kept(chosen, targets, mine, kept, group, temperature, entropy)


def log_probs_of_kept(
    chosen: Tensor,
    targets: Tensor,
    mine: Tensor,
    kept: Tensor,
    group: ProcessGroup,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    """As `log_probs`, of the logits `chosen` of the ids `kept`, `FAR` where another rank has them.

    Args:
        mine: bool ``[tokens]``, whether this rank has the logits of the `targets`.
    """
    place = (kept == targets[:, None]).to(torch.uint8).argmax(1)
    found = _LogProbs.apply(chosen, place, mine, group, temperature, entropy)
    sampled = (kept >= 0).any(1)
    return found[0].where(sampled, 0.0), found[1].where(sampled, 0.0)


def on_rank(ids: Tensor, width: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """In which of this rank's `width` columns each of the `ids` is, if it is in any, and whether it is: that
    of -1 is in none."""
    columns = ids - group.rank() * width
    here = (ids >= 0) & (columns >= 0) & (columns < width)
    return columns.clamp_(0, width - 1), here


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: Tensor,
        columns: Tensor,
        mine: Tensor,
        group: ProcessGroup,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """`columns`: those of the targets, which count where a target is `mine`."""
        found = _sums_by_kernel if kernels(logits) else _sums
        top, sums = found(logits, columns, mine, group, temperature, entropy)
        reduce_over(sums, ReduceOp.SUM, group)
        log_sum = sums[0].log()
        uncertainty = log_sum - sums[2] / sums[0] if entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(logits, columns, mine, top + log_sum, uncertainty)
        ctx.temperature, ctx.entropy = temperature, entropy
        return sums[1] - log_sum, uncertainty

    @staticmethod
    def backward(ctx: Any, to_log_prob: Tensor, to_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, columns, mine, log_total, uncertainty = ctx.saved_tensors
        if found := kernels(logits):
            spread = to_entropy if ctx.entropy else None
            of_tokens = log_total, to_log_prob, columns, mine, spread, uncertainty
            return found.to_logits(logits, *of_tokens, ctx.temperature), *[None] * 5
        gradient = torch.empty_like(logits)
        for part in _chunks(logits):
            log_p = (logits[part].float() / ctx.temperature).sub_(log_total[part, None])
            to_chosen = to_log_prob[part], columns[part], mine[part]
            to_spread = (to_entropy[part], uncertainty[part]) if ctx.entropy else None
            gradient[part] = to_logits(log_p, to_chosen, to_spread).div_(ctx.temperature)
        return gradient, None, None, None, None, None


def _sums(
    logits: Tensor, columns: Tensor, mine: Tensor, group: ProcessGroup, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """The greatest z of each token on any rank, and of this rank's, below that: sum exp z', z'[token] and
    sum z' exp z', ``[3, tokens]``."""
    count = len(logits)
    top = torch.full((count,), -torch.inf, device=logits.device)
    for part in _chunks(logits):
        top[part] = logits[part].amax(-1).float() / temperature
    reduce_over(top, ReduceOp.MAX, group)
    sums = torch.zeros(3, count, device=logits.device)
    for part in _chunks(logits):
        z = (logits[part].float() / temperature).sub_(top[part, None])
        sums[1, part] = z.gather(1, columns[part, None]).squeeze(1) * mine[part]
        e = z.exp()
        sums[0, part] = e.sum(-1)
        if entropy:
            sums[2, part] = e.mul_(z).sum(-1)
    return top, sums


def _sums_by_kernel(
    logits: Tensor, columns: Tensor, mine: Tensor, group: ProcessGroup, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """As `_sums`, where there are kernels."""
    own, total, spread = kernels(logits).sums(logits, temperature, entropy)
    top = own.clone()
    reduce_over(top, ReduceOp.MAX, group)
    lowered = own - top
    scale = lowered.exp()
    chosen = logits.gather(1, columns[:, None]).squeeze(1).float() / temperature
    return top, torch.stack([total * scale, (chosen - top) * mine, (spread + lowered * total) * scale])


def kernels(logits: Tensor) -> Any:
    """Those for logits like these, if there are any."""
    if logits.is_cuda:
        from hflow.runtime.engines.megatron.kernels import logprobs  # where there is CUDA there is Triton

        return logprobs
    return cpu_kernels if runs_on(logits) else None


def to_logits(
    log_p: Tensor, to_chosen: tuple[Tensor, Tensor, Tensor], to_spread: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient of the logits z, with one copy of them beside `log_p`, which it overwrites:

        dL/dz = (1[chosen] - p) dL/dlog_prob - p (log p + H) dL/dH

    Args:
        log_p: float32 ``[tokens, width]``.
        to_chosen: dL/dlog_prob; the column of the chosen token; and whether it is in any; ``[tokens]`` each.
        to_spread: dL/dH and the entropy H itself, ``[tokens]`` each; None: no gradient.
    """
    (to_log_prob, columns, inside), of_entropy = to_chosen, None
    p = log_p.exp_() if to_spread is None else log_p.exp()
    if to_spread is not None:
        to_entropy, entropy = to_spread
        of_entropy = log_p.add_(entropy[:, None]).mul_(p).mul_(to_entropy[:, None])
    gradient = p.mul_(-to_log_prob[:, None])
    gradient.scatter_add_(1, columns[:, None], (to_log_prob * inside)[:, None])
    return gradient if of_entropy is None else gradient.sub_(of_entropy)


def _chunks(logits: Tensor) -> list[slice]:
    """Consecutive parts of the tokens whose float32 logits fill at most `CHUNK_BYTES`."""
    count, width = logits.shape
    size = max(1, CHUNK_BYTES // (4 * width))
    return [slice(start, start + size) for start in range(0, count, size)]


def reduce_over(values: Tensor, op: Any, group: ProcessGroup) -> None:
    """In place, over all ranks of `group`."""
    if group.size() > 1:
        all_reduce(values, op=op, group=group)
