"""Sampling from a transformers model with hflow's own random numbers.

The samples of a prompt are a batch, so that nothing is padded; a row that has ended goes on unheard.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hflow.runtime.engines.finite import check_logits
from hflow.runtime.engines.sampler import Answers, Sampling
from hflow.runtime.kept import KeptCollector
from hflow.runtime.rows import Rows, from_lists
from hflow.runtime.sampling import sample, uniform
from hflow.runtime.truncation import OUT, truncate

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
    sets = KeptCollector(len(ids), sampling.max_kept) if sampling.max_kept else None
    for text, rows in zip(texts, ids.to(device).split(n)):
        for part in rows.split(limit):
            found += _respond(model, text, part, sampling, sets, len(found))
    tokens = from_lists([response for response, _ in found])
    log_probs = torch.tensor([x for _, response in found for x in response], dtype=torch.float32)
    kept, overflown = sets.collected() if sets else (None, None)
    return Answers(tokens, Rows(log_probs, tokens.lengths), kept=kept, overflown=overflown)


def _respond(
    model: PreTrainedModel,
    prompt: Tensor,
    ids: Tensor,
    sampling: Sampling,
    sets: KeptCollector | None,
    first: int,
) -> list[SampledResponse]:
    """The samples of one prompt, int64 ``[length]``, with the global numbers `ids`, int64 ``[rows]``. Of them
    the first is row `first` of `sets`."""
    read, cache = prompt.expand(len(ids), -1), None
    so_far = read[:, :0]
    going = torch.ones_like(ids, dtype=torch.bool)
    responses: list[SampledResponse] = [([], []) for _ in ids]
    for step in range(sampling.max_new_tokens):
        found = model(input_ids=read, past_key_values=cache, use_cache=True)
        logits, cache = found.logits[:, -1], found.past_key_values
        check_logits(logits[going], ids[going], step)
        logits = logits.nan_to_num()
        if sampling.truncation:
            truncate(logits, sampling.temperature, sampling.truncation)
        if sets:
            sets.add(first + going.nonzero().squeeze(1), logits[going] > OUT)
        u = uniform(sampling.seed, sampling.step, ids, step, sampling.stream)
        tokens, log_probs = sample(logits, u, sampling.temperature)
        for row in going.nonzero().squeeze(1).tolist():
            responses[row][0].append(int(tokens[row]))
            responses[row][1].append(float(log_probs[row]))
        read = tokens[:, None]
        so_far = torch.cat([so_far, read], 1)
        going &= sampling.ends.going(so_far)
        if not going.any():
            break
    return responses
