"""What a transformers model says of texts, one row after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hflow.runtime.kept import KeptSets
from hflow.runtime.rows import Rows


@torch.no_grad()
def score(
    model: Any,
    tokens: Rows,
    mask: Rows,
    temperature: float,
    device: torch.device,
    kept: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of every response token and entropy of the distribution it is drawn from, float32
    ``[response tokens]`` each, row by row; over the `kept` sets, if there are any, and 0 where one is empty.

    Raises:
        ValueError: a row has no prompt.
    """
    log_probs, entropy = [torch.zeros(0)], [torch.zeros(0)]
    sets = KeptSets(kept, mask.row_lengths) if kept else None
    for number, (row, length) in enumerate(_rows(tokens, mask, device)):
        logits = model(input_ids=row[None]).logits[0, len(row) - length - 1 : -1].float() / temperature
        ids = sets.take(torch.tensor([number])).padded().to(device) if sets else None
        every = (logits if ids is None else _left(logits, ids)).log_softmax(-1)
        terms = every.exp() * every
        if ids is not None:
            terms = terms.where(every > -torch.inf, 0.0)
        log_probs.append(every.gather(1, row[len(row) - length :, None]).squeeze(1).cpu())
        entropy.append(-terms.sum(-1).cpu())
    if sets:
        sampled = sets.counts > 0
        return torch.cat(log_probs).where(sampled, 0.0), torch.cat(entropy).where(sampled, 0.0)
    return torch.cat(log_probs), torch.cat(entropy)


def _left(logits: Tensor, kept: Tensor) -> Tensor:
    """Of ``[tokens, vocab]`` only the kept ids, int64 ``[tokens, largest set]``, padded with -1."""
    inside = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    inside.scatter_(1, kept.where(kept >= 0, logits.shape[1]), True)
    return logits.masked_fill(~inside[:, :-1], -torch.inf)


@torch.no_grad()
def judge(model: Any, tokens: Rows, mask: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a model with a scalar head gives before every response token, float32 ``[response tokens]``, and
    after each row, float32 ``[rows]``.

    Raises:
        ValueError: a row has no prompt.
    """
    values, scores = [torch.zeros(0)], [torch.zeros(0)]
    for row, length in _rows(tokens, mask, device):
        numbers = model.score(model.model(input_ids=row[None]).last_hidden_state)[0, :, 0].float().cpu()
        values.append(numbers[len(row) - length - 1 : -1])
        scores.append(numbers[-1:])
    return torch.cat(values), torch.cat(scores)


def _rows(tokens: Rows, mask: Rows, device: torch.device) -> Iterator[tuple[Tensor, int]]:
    """Every text, int64 ``[length]``, and the length of its response."""
    if (mask.row_lengths >= tokens.row_lengths).any():
        raise ValueError("a row has no prompt before its response")
    texts = tokens.values.to(device, torch.int64).split(tokens.row_lengths.tolist())
    yield from zip(texts, mask.row_lengths.tolist())
