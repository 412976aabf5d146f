"""What a transformers model says of texts, one row after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hflow.runtime.rows import Rows


@torch.no_grad()
def score(
    model: Any, tokens: Rows, mask: Rows, temperature: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-probability of every response token and entropy of the distribution it is drawn from, float32
    ``[response tokens]`` each, row by row.

    Raises:
        ValueError: a row has no prompt.
    """
    log_probs, entropy = [torch.zeros(0)], [torch.zeros(0)]
    for row, length in _rows(tokens, mask, device):
        logits = model(input_ids=row[None]).logits[0, len(row) - length - 1 : -1].float() / temperature
        every = logits.log_softmax(-1)
        log_probs.append(every.gather(1, row[len(row) - length :, None]).squeeze(1).cpu())
        entropy.append(-(every.exp() * every).sum(-1).cpu())
    return torch.cat(log_probs), torch.cat(entropy)


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
