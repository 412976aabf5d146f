"""Attention of rows that share prompts, to each prompt once.

A response sees its prompt and itself. Attention to either is computed alone, of all responses to a prompt in
one product, and then put together by the logarithms of their sums, as FlashAttention does with parts of a row
(arXiv:2205.14135, section 3.1). Rows whole would have a prompt's queries again for each response, and a copy
of its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.rows import length_mask

WORTH = 0.85  # of the scores of whole rows; with more of them parts take as long (measured)
NEVER = 1e30  # a log-sum by which nothing has a weight


@dataclass(frozen=True)
class Part:
    """Tokens that see others, by their places in the pack.

    Attributes:
        queries, keys: int64 ``[blocks, longest]``; any place where there is no token. Those of causal parts
            are the same.
        real_queries, real_keys: bool ``[blocks, longest]``: where there is one.
    """

    queries: Tensor
    real_queries: Tensor
    keys: Tensor
    real_keys: Tensor
    causal: bool


@dataclass(frozen=True)
class SharedPrompts:
    """`own`: what prompts, and responses, see of themselves: every token once. `before`: what responses see
    of their prompts."""

    own: tuple[Part, ...]
    before: tuple[Part, ...]

    @staticmethod
    def of(
        sequences: Sequences, places: Tensor, blocks_of: Callable[[list[int]], list[list[int]]]
    ) -> SharedPrompts | None:
        """None where too little is shared.

        Args:
            places: int64 ``[rows, longest]``, of the tokens of each row.
            blocks_of: numbers of rows by their lengths, which are long beside each other.
        """
        first = sequences.same_prompt
        prompts, responses = sequences.prompt_lengths, (sequences.response_lengths - 1).clamp(min=0)
        leads = first == torch.arange(len(first), device=first.device)
        apart = (leads * prompts * prompts).sum() + (responses * (2 * prompts + responses)).sum()
        if apart >= WORTH * ((prompts + responses) ** 2).sum():
            return None
        prompt_of = {row: places[row, : int(prompts[row])] for row in leads.nonzero()[:, 0].tolist()}
        response_of = [
            places[row, start : start + count]
            for row, (start, count) in enumerate(zip(prompts.tolist(), responses.tolist(), strict=True))
        ]
        own = [
            _causal([rows[row] for row in block])
            for rows in (list(prompt_of.values()), response_of)
            for block in blocks_of([len(row) for row in rows])
        ]
        before = list[Part]()
        for row, prompt in prompt_of.items():
            seeing = torch.cat([response_of[other] for other in (first == row).nonzero()[:, 0].tolist()])
            if len(seeing):
                before.append(_after(prompt, seeing))
        return SharedPrompts(tuple(own), tuple(before))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """softmax(q kᵀ / sqrt(d)) v of ``[places, heads, d]``, keys and values of as many heads or fewer; 0
        of places that belong to no row. On a CPU."""
        return _Attention.apply(query, key, value, self)


def _causal(rows: Sequence[Tensor]) -> Part:
    real = length_mask(torch.tensor([len(row) for row in rows], device=rows[0].device), max(map(len, rows)))
    queries = rows[0].new_zeros(real.shape)
    queries[real] = torch.cat(list(rows))
    return Part(queries, real, queries, real, True)


def _after(prompt: Tensor, responses: Tensor) -> Part:
    queries, keys = responses[None], prompt[None]
    real_queries, real_keys = (torch.ones_like(x, dtype=torch.bool) for x in (queries, keys))
    return Part(queries, real_queries, keys, real_keys, False)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts
    ) -> Tensor:
        found = torch.zeros_like(query)
        sums = torch.full(query.shape[:2], NEVER, dtype=torch.promote_types(query.dtype, torch.float32))
        for part in shared.own:
            at = part.queries[part.real_queries]
            found[at], sums[at] = _attended(part, query, key, value)
        for part in shared.before:
            at = part.queries[part.real_queries]
            out, log_sums = _attended(part, query, key, value)
            own, total = sums[at], torch.logaddexp(sums[at], log_sums)
            of_own, of_prompt = ((x - total).exp_()[..., None] for x in (own, log_sums))
            found[at], sums[at] = (found[at] * of_own + out * of_prompt).to(out.dtype), total
        ctx.save_for_backward(query, key, value, found, sums)
        ctx.shared = shared
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """With the log-sums of all that a token sees the gradients of its parts are those of the whole."""
        query, key, value, found, sums = ctx.saved_tensors
        into = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            for x in (query, key, value)
        ]
        for part in (*ctx.shared.own, *ctx.shared.before):
            tokens = (part.queries, part.real_queries), *[(part.keys, part.real_keys)] * 2
            found_here = _gradients(part, gradient, query, key, value, found, sums)
            for total, (at, real), own in zip(into, tokens, found_here, strict=True):
                total[at[real]] += own.transpose(1, 2)[real].to(total.dtype)  # a place is in a part but once
        to_query, to_key, to_value = (x.to(query.dtype) for x in into)
        return to_query, to_key, to_value, None


def _blocks(x: Tensor, at: Tensor) -> Tensor:
    """``[blocks, heads, tokens, …]`` of ``[places, heads, …]``."""
    return x[at].transpose(1, 2)


def _attended(part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """``[queries, heads, d]`` of those that are real, and their sums' logarithms, ``[queries, heads]``."""
    given = _blocks(query, part.queries), _blocks(key, part.keys), _blocks(value, part.keys)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, is_causal=part.causal)
    return out.transpose(1, 2)[part.real_queries], sums.transpose(1, 2)[part.real_queries]


def _gradients(
    part: Part, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values, ``[blocks, heads, tokens, d]``; what is no query has no part in them."""
    upstream = gradient[part.queries].masked_fill_(~part.real_queries[..., None, None], 0).transpose(1, 2)
    log_sums = (
        sums[part.queries].masked_fill_(~part.real_queries[..., None], NEVER).transpose(1, 2).contiguous()
    )
    given = _blocks(query, part.queries), _blocks(key, part.keys), _blocks(value, part.keys)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream, *given, _blocks(found, part.queries), log_sums, 0.0, part.causal
    )
