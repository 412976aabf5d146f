"""Sampling that does not depend on how rows are batched, split or ordered.

Every random number is a function of (run seed, step, row, position in the response, stream): the same
token is drawn whichever device generates the row, and a resumed run draws what the uninterrupted one would
have. Each generate node of a graph has a stream of its own.
The hash is SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014),
fed one counter after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
WORDS = 512  # of a block of the vocabulary
CHUNK_ELEMENTS = 2**22  # float64 probabilities held at once


def uniform(seed: int, step: int, rows: Tensor, positions: Tensor | int, stream: int = 0) -> Tensor:
    """Uniform numbers in [0, 1), float64 with 53 random bits, of the shape to which `rows` and `positions`
    broadcast.

    Args:
        rows: int64, global row ids, of any shape.
        positions: int64, or one position for all.
        stream: numbers of other streams are others; stream 0 is not hashed in.
    """
    state = torch.zeros_like(rows)
    for counter in (seed, step, rows, positions, *([stream] if stream else [])):
        state = splitmix(state + counter)
    return _shift_right(state, 11).double() * 2.0**-53


def row_seeds(seed: int, step: int, rows: Tensor, stream: int = 0) -> Tensor:
    """62-bit numbers, int64 like `rows`, for engines that draw a whole row's tokens from one seed."""
    state = torch.zeros_like(rows)
    for counter in (seed, step, rows, *([stream] if stream else [])):
        state = splitmix(state + counter)
    return _shift_right(state, 2)


def splitmix(state: Tensor) -> Tensor:
    """The output of SplitMix64 for an int64 `state`; wraps modulo 2^64."""
    x = state + GAMMA
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift without sign: torch's int64 would shift in ones for negative numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution, in float64.

    Args:
        logits: ``[rows, vocab]``; minus infinity for a token that cannot be drawn.
        u: uniform numbers in [0, 1), float64 ``[rows]``.
        temperature: divides the logits; 0 takes the most likely token.

    Returns:
        Tokens, int64 ``[rows]``, and their log-probabilities, float32 ``[rows]``, under the distribution
        sampled from (at temperature 0: under the distribution at temperature 1).
    """
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    parts = [_sample(z, v, temperature) for z, v in zip(logits.split(size), u.split(size))]
    tokens, log_probs = zip(*parts)
    return torch.cat(tokens), torch.cat(log_probs)


def _sample(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.double() / (temperature or 1.0), -1)
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        tokens = _inverted(log_p.exp(), u)
    return tokens, log_p.gather(1, tokens[:, None]).squeeze(1).float()


def _inverted(weights: Tensor, u: Tensor) -> Tensor:
    """The first token up to which more than a share u of all `weights`, float64 ``[rows, vocab]``, lies.

    Of a large vocabulary first a block of words is found, then a word in it. The cumulative sums of all
    took an H200 0.25 ms for 16 rows of 151,936, 19 MB that it reads in 0.005.
    """
    rows, words = weights.shape
    if words <= WORDS:
        cumulative = weights.cumsum(-1)
        return _first_beyond(cumulative, u * cumulative[:, -1])
    blocks = pad(weights, (0, -words % WORDS)).view(rows, -1, WORDS)
    sums = blocks.sum(-1)
    cumulative = sums.cumsum(-1)
    target = u * cumulative[:, -1]
    block = _first_beyond(cumulative, target)[:, None]
    # Rounding may carry the start beyond the target, and so to a word without weight.
    start = torch.minimum((cumulative - sums).gather(1, block), target[:, None])
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, WORDS)).squeeze(1)
    return block.squeeze(1) * WORDS + _first_beyond(start + inside.cumsum(-1), target)


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first of ``[rows, values]``, which do not fall, that is greater than the `target`, ``[rows]``."""
    last = cumulative[:, -1]
    # Rounding may carry the target up to the last sum itself, and beyond it.
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
