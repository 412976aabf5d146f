"""Attention of rows that share prompts, to each prompt once.

A response sees its prompt and itself. Attention to either is computed alone, of all responses to a prompt in
one product, and then put together by the logarithms of their sums, as FlashAttention does with parts of a row
(arXiv:2205.14135, section 3.1). Rows whole would have a prompt's queries again for each response, and a copy
of its keys and values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hflow.plan.shared_attention import is_worth_sharing
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.rows import length_mask

NEVER = 1e30  # a log-sum by which nothing has a weight


@dataclass(frozen=True)
class TokenBlocks:
    """Some tokens of a pack in blocks, ``[blocks, longest]``, which may have room left.

    Attributes:
        shape: (blocks, longest).
        at: int64 ``[blocks * longest]``: places in the pack; any where there is no token.
        real: int64: which of these are tokens, in order; None: all.
        places: int64: the places of these.
    """

    shape: tuple[int, int]
    at: Tensor
    real: Tensor | None
    places: Tensor

    @staticmethod
    def of(rows: Sequence[Tensor]) -> TokenBlocks:
        """Args: rows: the places of the tokens of each block, int64."""
        lengths, places = torch.tensor([len(row) for row in rows]), torch.cat(list(rows))
        shape = len(rows), int(lengths.max())
        if len(places) == shape[0] * shape[1]:
            return TokenBlocks(shape, places, None, places)
        real = length_mask(lengths, shape[1]).flatten().nonzero()[:, 0]
        at = places.new_zeros(shape[0] * shape[1])
        at[real] = places
        return TokenBlocks(shape, at, real, places)

    def blocks(self, x: Tensor) -> Tensor:
        """``[blocks, heads, longest, …]`` of ``[places, heads, …]``."""
        return x.index_select(0, self.at).unflatten(0, self.shape).transpose(1, 2)

    def blocks_of_real(self, x: Tensor, nothing: float) -> Tensor:
        """The same, with `nothing` where there is no token."""
        if self.real is None:
            return self.blocks(x)
        found = x.new_full((len(self.at), *x.shape[1:]), nothing)
        found.index_copy_(0, self.real, x.index_select(0, self.places))
        return found.unflatten(0, self.shape).transpose(1, 2)

    def taken(self, blocks: Tensor) -> Tensor:
        """``[tokens, heads, …]`` of ``[blocks, heads, longest, …]``."""
        found = blocks.transpose(1, 2).flatten(0, 1)
        return found if self.real is None else found.index_select(0, self.real)


@dataclass(frozen=True)
class Part:
    """Tokens that see others: all of their block, or, where these are the same tokens, none that follow."""

    queries: TokenBlocks
    keys: TokenBlocks
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
        once, rows = leads * prompts, prompts + responses
        seen_once = int((once**2).sum() + (responses * (2 * prompts + responses)).sum()) / 2
        tokens, seen_whole = int((once + responses).sum()), int((rows**2).sum()) / 2
        if not is_worth_sharing(seen_once, tokens, seen_whole, int(rows.sum())):
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
        seeing: dict[int, list[Tensor]] = {row: [] for row in prompt_of}
        for row, prompt in enumerate(first.tolist()):
            seeing[prompt].append(response_of[row])
        before = _after([(prompt_of[row], torch.cat(seen)) for row, seen in seeing.items()], blocks_of)
        return SharedPrompts(tuple(own), tuple(before))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """softmax(q kᵀ / sqrt(d)) v of ``[places, heads, d]``, keys and values of as many heads or fewer; 0
        of places that belong to no row. On a CPU."""
        return _Attention.apply(query, key, value, self)


def _causal(rows: Sequence[Tensor]) -> Part:
    tokens = TokenBlocks.of(rows)
    return Part(tokens, tokens, True)


def _after(
    seen: Sequence[tuple[Tensor, Tensor]], blocks_of: Callable[[list[int]], list[list[int]]]
) -> Iterator[Part]:
    """Responses that see their prompts, of which those of one length are taken together.

    Args:
        seen: the places of each prompt, and of all its responses.
    """
    by_length = defaultdict[int, list[tuple[Tensor, Tensor]]](list)
    for prompt, responses in seen:
        by_length[len(prompt)].append((prompt, responses))
    for some in by_length.values():
        for block in blocks_of([len(responses) for _, responses in some]):
            keys, queries = (TokenBlocks.of(x) for x in zip(*(some[each] for each in block), strict=True))
            yield Part(queries, keys, False)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts
    ) -> Tensor:
        found = torch.zeros_like(query)
        sums = torch.full(query.shape[:2], NEVER, dtype=torch.promote_types(query.dtype, torch.float32))
        at, out, log_sums = _attended(shared.own, query, key, value)
        found.index_copy_(0, at, out)
        sums.index_copy_(0, at, log_sums)
        if shared.before:
            at, out, log_sums = _attended(shared.before, query, key, value)
            own = sums.index_select(0, at)
            total = torch.logaddexp(own, log_sums)
            of_own, of_prompt = ((x - total).exp_()[..., None] for x in (own, log_sums))
            together = found.index_select(0, at) * of_own + out * of_prompt
            found.index_copy_(0, at, together.to(out.dtype))
            sums.index_copy_(0, at, total)
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
            tokens = part.queries, part.keys, part.keys
            found_here = _gradients(part, gradient, query, key, value, found, sums)
            for total, of, own in zip(into, tokens, found_here, strict=True):
                total.index_add_(0, of.places, of.taken(own).to(total.dtype))
        to_query, to_key, to_value = (x.to(query.dtype) for x in into)
        return to_query, to_key, to_value, None


def _attended(
    parts: Sequence[Part], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of all parts the places of queries, what they see, ``[queries, heads, d]``, and their sums' logarithms,
    ``[queries, heads]``."""
    outs, sums = list[Tensor](), list[Tensor]()
    for part in parts:
        given = part.queries.blocks(query), part.keys.blocks(key), part.keys.blocks(value)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, is_causal=part.causal)
        outs.append(part.queries.taken(found[0]))
        sums.append(part.queries.taken(found[1]))
    return torch.cat([part.queries.places for part in parts]), torch.cat(outs), torch.cat(sums)


def _gradients(
    part: Part, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values, ``[blocks, heads, tokens, d]``; what is no query has no part in them."""
    upstream, log_sums = part.queries.blocks_of_real(gradient, 0.0), part.queries.blocks_of_real(sums, NEVER)
    given = part.queries.blocks(query), part.keys.blocks(key), part.keys.blocks(value)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream, *given, part.queries.blocks(found), log_sums.contiguous(), 0.0, part.causal
    )
