"""Log-probs and entropy of tokens from the hidden states that predict them, by as few logits as fit.

Logits are the product of hidden states and output matrix. Where a plan counts on it that all of a micro-batch
fit (`hflow.plan.logits`), they are made once and kept. Else they are made by tiles of tokens and words, and
no more than one tile is ever in memory. The forward pass keeps hidden states, and of each token the log of
the sum, with which the backward pass can make any tile again (as Cut Cross-Entropy does, arXiv:2411.09009).

Of kept sets, the logits of their ids are kept, and no tile is made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from hflow.plan.logits import keeps_logits, tile_side
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.logprobs import (
    FAR,
    kernels,
    log_probs,
    log_probs_of_kept,
    on_rank,
    reduce_over,
    to_logits,
)
from hflow.runtime.engines.megatron.products import product
from hflow.runtime.engines.megatron.soft_cap import cap_, slope_of, soft_capped_


def predicted(
    hidden: Tensor,
    matrix: OutputMatrix,
    targets: Tensor,
    temperature: float = 1.0,
    entropy: bool = True,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `log_probs`, of the logits that `matrix` gives for `hidden`, ``[tokens, hidden]``.

    The gradient of a matrix whose logits are not kept is added to its ``main_grad``, where Megatron's
    optimizer collects those of all micro-batches; autograd gives it none. Collective over the
    tensor-parallel group, the backward pass too, which sums the gradient of the hidden states.
    """
    weight, group, cap = matrix.weight, matrix.group, matrix.cap
    if keeps_logits(len(hidden), len(weight)):
        return log_probs(matrix.logits(hidden), targets, group, temperature, entropy, kept)
    columns, mine = on_rank(targets, len(weight), group)
    if kept is None:
        return _TiledLogProbs.apply(hidden, weight, columns, mine, group, temperature, entropy, cap)
    inside, here = on_rank(kept, len(weight), group)
    chosen = soft_capped_(_TiledChoice.apply(hidden, weight, inside, here, group), cap)
    return log_probs_of_kept(chosen.masked_fill(~here, FAR), targets, mine, kept, group, temperature, entropy)


class _TiledLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        mine: Tensor,
        group: ProcessGroup,
        temperature: float,
        entropy: bool,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """`columns`: those of the targets, which count where a target is `mine`."""
        parts = len(_parts(len(weight), cap))
        tops = torch.empty(parts, len(hidden), device=hidden.device)
        sums = torch.empty(2, parts, len(hidden), device=hidden.device)  # of exp z', z' exp z', below its top
        chosen = torch.zeros(len(hidden), device=hidden.device)
        for number, (words, some) in _tiles(weight, hidden, cap):
            at, inside = _inside(words, columns[some, None], mine[some, None])
            found = _sums_of_tile(hidden[some], weight[words], at, temperature, entropy, cap)
            own, tops[number, some], sums[:, number, some] = found
            chosen[some] = own.where(inside, chosen[some, None])[:, 0]
        log_prob, log_total, uncertainty = _joined(tops, sums, chosen, group, entropy)
        ctx.save_for_backward(hidden, weight, columns, mine, log_total, uncertainty)
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.group, ctx.temperature, ctx.entropy, ctx.cap = group, temperature, entropy, cap
        return log_prob, uncertainty

    @staticmethod
    def backward(ctx: Any, to_log_prob: Tensor, to_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, columns, mine, log_total, uncertainty = ctx.saved_tensors
        gradients = _Gradients(ctx, hidden, weight)
        for _, (words, some) in _tiles(weight, hidden, ctx.cap):
            at, inside = _inside(words, columns[some], mine[some])
            to_chosen = to_log_prob[some], at, inside
            to_spread = (to_entropy[some], uncertainty[some]) if ctx.entropy else None
            of_tokens = log_total[some], to_chosen, to_spread
            gradients.add(
                words, some, _slope(hidden[some], weight[words], *of_tokens, ctx.temperature, ctx.cap)
            )
        return gradients.of_hidden(ctx.group), *[None] * 7


class _TiledChoice(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, columns: Tensor, here: Tensor, group: ProcessGroup
    ) -> Tensor:
        """``[tokens, ids]``: the logits of the `columns` that are `here`, and else anything finite."""
        chosen = hidden.new_zeros(columns.shape)
        for _, (words, some) in _tiles(weight, hidden):
            at, inside = _inside(words, columns[some], here[some])
            chosen[some] = product(hidden[some], weight[words].t()).gather(1, at).where(inside, chosen[some])
        ctx.save_for_backward(hidden, weight, columns, here)
        ctx.main_grad, ctx.group = getattr(weight, "main_grad", None), group
        return chosen

    @staticmethod
    def backward(ctx: Any, to_chosen: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, columns, here = ctx.saved_tensors
        gradients = _Gradients(ctx, hidden, weight)
        for _, (words, some) in _tiles(weight, hidden):
            at, inside = _inside(words, columns[some], here[some])
            slope = hidden.new_zeros(len(at), len(weight[words]))
            gradients.add(words, some, slope.scatter_add_(1, at, to_chosen[some].where(inside, 0)))
            del slope
        return gradients.of_hidden(ctx.group), *[None] * 4


class _Gradients:
    """Sums over tiles, in float32: of the hidden states, and of the matrix where Megatron collects it."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor):
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        assert ctx.main_grad is not None or not wants_weight, "a trained matrix is Megatron's DDP's"
        self.hidden, self.weight = hidden, weight
        self.to_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        self.to_weight: Tensor | None = ctx.main_grad if wants_weight else None

    def add(self, words: slice, some: slice, slope: Tensor) -> None:
        """`slope`: the gradient of a tile's logits, which are of the model's dtype."""
        slope = slope.to(self.hidden.dtype)
        if self.to_hidden is not None:
            _add_product(self.to_hidden[some], slope, self.weight[words])
        if self.to_weight is not None:
            _add_product(self.to_weight[words], slope.t(), self.hidden[some])

    def of_hidden(self, group: ProcessGroup) -> Tensor | None:
        """Summed over tp in the model's dtype, as behind Megatron's column-parallel products."""
        if self.to_hidden is None:
            return None
        found = self.to_hidden.to(self.hidden.dtype)
        reduce_over(found, ReduceOp.SUM, group)
        return found


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b; in float32, without a copy of the product where the factors are, too."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(product(a, b))


def _parts(count: int, cap: float | None = None) -> list[slice]:
    side = tile_side(cap is not None)
    return [slice(start, min(start + side, count)) for start in range(0, count, side)]


def _tiles(
    weight: Tensor, hidden: Tensor, cap: float | None = None
) -> Iterator[tuple[int, tuple[slice, slice]]]:
    """Every pair of some words and some tokens, with the number of the former."""
    for number, words in enumerate(_parts(len(weight), cap)):
        for some in _parts(len(hidden), cap):
            yield number, (words, some)


def _tile(hidden: Tensor, weight: Tensor, temperature: float, cap: float | None) -> Tensor:
    """z of a tile, float32; the product is rounded to the model's dtype, as that of all logits is."""
    logits = product(hidden, weight.t()).float()
    return (logits if cap is None else cap_(logits, cap)).div_(temperature)


def _kernels(hidden: Tensor, cap: float | None) -> Any:
    """Those for logits of such hidden states, if there are any: none knows of caps."""
    return kernels(hidden) if cap is None else None


def _sums_of_tile(
    hidden: Tensor, weight: Tensor, at: Tensor, temperature: float, entropy: bool, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a tile: z in the columns `at`, ``[tokens, 1]``; the greatest z of each token; and what `_sums` gives
    for z less that."""
    if found := _kernels(hidden, cap):
        logits = product(hidden, weight.t())
        top, *sums = found.sums(logits, temperature, entropy)
        return logits.gather(1, at).float() / temperature, top, torch.stack(sums)
    z = _tile(hidden, weight, temperature, cap)
    own, top = z.gather(1, at), z.amax(-1)
    return own, top, _sums(z.sub_(top[:, None]), entropy)


def _slope(
    hidden: Tensor,
    weight: Tensor,
    log_total: Tensor,
    to_chosen: tuple[Tensor, Tensor, Tensor],
    to_spread: tuple[Tensor, Tensor] | None,
    temperature: float,
    cap: float | None,
) -> Tensor:
    """The gradient of a tile's logits; the last are those of `to_logits`."""
    if found := _kernels(hidden, cap):
        to_entropy, entropy = to_spread or (None, log_total)
        of_tokens = log_total, *to_chosen, to_entropy, entropy
        return found.to_logits(product(hidden, weight.t()), *of_tokens, temperature, in_place=True)
    z = _tile(hidden, weight, temperature, cap)
    through_cap = slope_of(z, cap / temperature) if cap else None
    slope = to_logits(z.sub_(log_total[:, None]), to_chosen, to_spread).div_(temperature)
    return slope if through_cap is None else slope.mul_(through_cap)


def _inside(words: slice, columns: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """In which column of a tile each of the `columns` is, if it is in any, and whether it is."""
    at, last = columns - words.start, words.stop - words.start - 1
    return at.clamp(0, last), here & (at >= 0) & (at <= last)


def _sums(z: Tensor, entropy: bool) -> Tensor:
    """``[2, tokens]``: sums of exp z and of z exp z, the latter 0 without `entropy`. Overwrites z."""
    if not entropy:
        total = z.exp_().sum(-1)
        return torch.stack([total, torch.zeros_like(total)])
    e = z.exp()
    return torch.stack([e.sum(-1), e.mul_(z).sum(-1)])


def _joined(
    tops: Tensor, sums: Tensor, chosen: Tensor, group: ProcessGroup, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, log of the sum and entropy of each token, ``[tokens]``, over all parts and ranks.

    Args:
        tops: ``[parts, tokens]``, the greatest z of each part of this rank's vocabulary.
        sums: ``[2, parts, tokens]``, of exp z' and z' exp z', where z' = z - top.
        chosen: ``[tokens]``, z of the targets that are this rank's, else 0.
    """
    top = tops.amax(0)
    reduce_over(top, ReduceOp.MAX, group)
    apart = tops - top
    shares = apart.exp()
    spread = ((sums[1] + apart * sums[0]) * shares).sum(0)
    total = torch.stack([(sums[0] * shares).sum(0), chosen, spread])
    reduce_over(total, ReduceOp.SUM, group)
    log_sum = total[0].log()
    uncertainty = log_sum - total[2] / total[0] if entropy else torch.zeros_like(log_sum)
    return total[1] - top - log_sum, top + log_sum, uncertainty
