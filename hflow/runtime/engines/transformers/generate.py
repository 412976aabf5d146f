"""Sampling from a transformers model with hflow's own random numbers.

The samples of a prompt are a batch, so that nothing is padded; a row that has ended goes on unheard.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hflow.runtime.engines.finite import check_logits
from hflow.runtime.engines.sampler import Answers, Sampling
from hflow.runtime.rows import Rows, from_lists
from hflow.runtime.sampling import sample, uniform

SampledResponse = tuple[list[int], list[float]]  # tokens and their log-probs


@torch.no_grad()
def generate(
    model: PreTrainedModel, prompts: Rows, ids: Tensor, sampling: Sampling, limit: int, device: torch.device
) -> Answers:
    """Responses to each prompt; see `Sampler`. At most `limit` rows are in memory at once.

    Raises:
        NotFinite: a logit of a row that has not ended is not.
    """
    texts = prompts.values.to(device, torch.int64).split(prompts.row_lengths.tolist())
    n = len(ids) // len(texts) if texts else 1
    found: list[SampledResponse] = []
    for text, rows in zip(texts, ids.to(device).split(n)):
        for part in rows.split(limit):
            found += _respond(model, text, part, sampling)
    tokens = from_lists([response for response, _ in found])
    log_probs = torch.tensor([x for _, response in found for x in response], dtype=torch.float32)
    return Answers(tokens, Rows(log_probs, tokens.lengths))


def _respond(
    model: PreTrainedModel, prompt: Tensor, ids: Tensor, sampling: Sampling
) -> list[SampledResponse]:
    """The samples of one prompt, int64 ``[length]``, with the global numbers `ids`, int64 ``[rows]``."""
    read, cache = prompt.expand(len(ids), -1), None
    going = torch.ones_like(ids, dtype=torch.bool)
    responses: list[SampledResponse] = [([], []) for _ in ids]
    for step in range(sampling.max_new_tokens):
        found = model(input_ids=read, past_key_values=cache, use_cache=True)
        logits, cache = found.logits[:, -1], found.past_key_values
        check_logits(logits[going], ids[going], step)
        u = uniform(sampling.seed, sampling.step, ids, step, sampling.stream)
        tokens, log_probs = sample(logits.nan_to_num(), u, sampling.temperature)
        for row in going.nonzero().squeeze(1).tolist():
            responses[row][0].append(int(tokens[row]))
            responses[row][1].append(float(log_probs[row]))
        going &= tokens != sampling.eos_id
        read = tokens[:, None]
        if not going.any():
            break
    return responses
