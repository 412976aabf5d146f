"""Which tokens a truncated sampler chooses among: the same on every engine.

In this order, as transformers and vLLM have it, each on what the one before has left:

1. the logits, in float32, are divided by the temperature;
2. `top_k`: a token stays if at most k - 1 tokens are more likely, so all that tie with the k-th stay;
3. `top_p` (nucleus sampling, arXiv:1904.09751): in order of probability, the token with the lower id first
   among equals, those tokens stay before which less than p of the probability lies;
4. `min_p` (arXiv:2407.01082): a token stays if it has at least `min_p` of the probability of the most likely.

The most likely token always stays. The probabilities of steps 3 and 4 are of a softmax over what is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.graph.types import Truncation
from hflow.runtime.sampling import CHUNK_ELEMENTS

OUT = -torch.inf  # the logit of a token that is left out


def truncate(logits: Tensor, temperature: float, truncation: Truncation) -> None:
    """Set the logits of tokens that are left out to `OUT`, in place, some rows at a time.

    Args:
        logits: ``[rows, vocab]``, finite.
        temperature: 0 counts as 1: it leaves the most likely token in any case.
    """
    for part in logits.split(max(1, CHUNK_ELEMENTS // logits.shape[-1])):
        part.masked_fill_(~kept_tokens(part, temperature, truncation), OUT)


def kept_tokens(logits: Tensor, temperature: float, truncation: Truncation) -> Tensor:
    """bool ``[rows, vocab]``: whether a token may be chosen; see `truncate`."""
    scores = logits.float() / (temperature or 1.0)
    if truncation.top_k is not None:
        scores = _top_k(scores, truncation.top_k)
    if truncation.top_p is not None:
        scores = _top_p(scores, truncation.top_p)
    if truncation.min_p is not None:
        scores = _min_p(scores, truncation.min_p)
    return scores > OUT


def _top_k(scores: Tensor, k: int) -> Tensor:
    least = scores.topk(min(k, scores.shape[-1]), -1).values[:, -1:]
    return scores.masked_fill(scores < least, OUT)


def _top_p(scores: Tensor, p: float) -> Tensor:
    """What lies before a token, in float32, is summed from the least likely on, as in transformers."""
    falling, ids = scores.sort(dim=-1, descending=True, stable=True)
    # Of each token, and of all that come after it.
    remaining = falling.flip(-1).softmax(-1).cumsum(-1).flip(-1)
    out = remaining <= 1 - p
    out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(out).scatter(1, ids, out), OUT)


def _min_p(scores: Tensor, least: float) -> Tensor:
    p = scores.softmax(-1)
    return scores.masked_fill(p < least * p.amax(-1, keepdim=True), OUT)
