"""Generation with a key-value cache: each prompt is read once, finished rows leave the batch."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from hflow.runtime.engines.finite import check_logits
from hflow.runtime.engines.megatron import static_decoding
from hflow.runtime.engines.megatron.cpu_kernels.library import runs_on
from hflow.runtime.engines.megatron.cpu_kernels.sampling import sample as sample_on_cpu
from hflow.runtime.engines.megatron.decoder import Decoder
from hflow.runtime.engines.megatron.moe.lockstep import Lockstep
from hflow.runtime.engines.megatron.moe.route_buffer import RouteBuffer
from hflow.runtime.engines.megatron.moe.routes import Recorder, recorded
from hflow.runtime.engines.megatron.responses import Responses
from hflow.runtime.engines.sampler import NotFinite, Sampling
from hflow.runtime.kept import KeptCollector, KeptSets
from hflow.runtime.rows import Rows, concatenate, length_mask
from hflow.runtime.sampling import sample, uniform
from hflow.runtime.truncation import OUT, truncate

DRAWN = 64  # tokens of each row whose random numbers are made together


@torch.no_grad()
def generate(
    model: GPTModel, prompts: Rows, ids: Tensor, sampling: Sampling, limit: int, device: torch.device
) -> Responses:
    """Sample responses to each prompt, each until it ends (`EndRule`).

    `ids`, int64 ``[prompts * n]``, are the global numbers of the rows to be made, to which their random
    numbers belong; row r continues prompt r // n. At most `limit` rows are in memory at once. Collective
    over the tensor-parallel group, whose ranks all draw the same tokens, and over the replicas that share
    experts.

    Raises:
        NotFinite: a logit is not, on all ranks of that group.
    """
    total = len(ids)
    n = total // len(prompts) if total else 1
    # Whole prompts where they fit, so that no prompt is read twice.
    size = limit // n * n or limit
    parts = list[Responses]()
    lockstep = Lockstep(model)
    waves, most = ceil(total / size), lockstep.most(ceil(total / size))
    for wave, start in enumerate(range(0, total, size)):
        rows = torch.arange(start, min(start + size, total), device=device)
        first, last = start // n, int(rows[-1]) // n + 1
        inputs = left_padded(prompts.slice(first, last), device)
        with recorded(model, sampling.routes) as recorder:
            of = *inputs, rows // n - first, ids.to(device)[rows]
            try:
                parts.append(_generate_batch(model, *of, sampling, recorder, lockstep))
            except NotFinite:
                lockstep.sit_out(most - wave - 1, sampling.max_new_tokens)
                raise
    lockstep.sit_out(most - waves, sampling.max_new_tokens)
    if not parts:
        parts = [_nothing(sampling, device)]
    return Responses(
        torch.cat([p.tokens for p in parts]),
        torch.cat([p.log_probs for p in parts]),
        torch.cat([p.lengths for p in parts]),
        _together([p.kept for p in parts if p.kept]),
        concatenate([p.routes for p in parts if p.routes]) if sampling.routes else None,
    )


def _nothing(sampling: Sampling, device: torch.device) -> Responses:
    """Of no rows."""
    kept = KeptCollector(0, 0).collected() if sampling.max_kept else None
    routes = Rows(torch.empty(0, dtype=torch.int16), torch.empty(0, dtype=torch.int64))
    nothing = Responses.to_fill(0, sampling.max_new_tokens, device)
    return replace(nothing, kept=kept, routes=routes if sampling.routes else None)


def _together(parts: list[tuple[KeptSets, Tensor]]) -> tuple[KeptSets, Tensor] | None:
    if not parts:
        return None
    sets, overflown = zip(*parts)
    lengths = torch.cat([part.lengths for part in sets])
    return KeptSets(concatenate([part.rows for part in sets]), lengths), torch.cat(overflown)


def left_padded(prompts: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as int64 ``[prompts, longest]`` ending in the last column, and a bool mask of their tokens."""
    longest = int(prompts.row_lengths.max())
    present = length_mask(prompts.row_lengths, longest).flip(1)
    tokens = torch.zeros(present.shape, dtype=torch.int64)
    tokens[present] = prompts.values.to(torch.int64)
    return tokens.to(device), present.to(device)


def _generate_batch(
    model: GPTModel,
    prompts: Tensor,
    present: Tensor,
    prompt_of: Tensor,
    ids: Tensor,
    sampling: Sampling,
    recorder: Recorder | None,
    lockstep: Lockstep,
) -> Responses:
    """Responses of rows that continue ``prompts[prompt_of]``; `ids`: their global row ids."""
    steps = sampling.max_new_tokens
    out = Responses.to_fill(len(prompt_of), steps, prompts.device)
    decoder = Decoder(model, prompts.shape[1] + steps)
    cache = decoder.cache(len(prompts), prompts.shape[1])
    padding = None if bool(present.all()) else present
    logits = decoder(prompts, padding, cache)[prompt_of]
    if static_decoding.is_static(model, sampling):
        cache.repeat(prompt_of, decoder.length)
        static_decoding.decode(decoder, cache, logits, present[prompt_of], ids, sampling, out)
        return out
    routes = RouteBuffer.of(recorder, present, prompt_of, steps) if recorder else None
    seen = None
    if decoder.can_share:
        cache.share(prompt_of, padding, steps)
    else:
        cache.repeat(prompt_of, decoder.length)
        seen = None if padding is None else padding[prompt_of]
    active = torch.arange(len(prompt_of), device=prompts.device)
    sets = KeptCollector(len(prompt_of), sampling.max_kept) if sampling.max_kept else None
    for step in range(steps):
        if step % DRAWN == 0:  # all at once: numbers of one token take as long as those of many
            positions = torch.arange(step, min(step + DRAWN, steps), device=prompts.device)
            numbers = uniform(sampling.seed, sampling.step, ids[:, None], positions, sampling.stream)
        try:
            check_logits(logits, ids[active], step)
        except NotFinite:
            lockstep.follow(step, steps)
            raise
        if sampling.truncation:
            truncate(logits, sampling.temperature, sampling.truncation)
        if sets:
            sets.add(active, logits > OUT)
        draw = sample_on_cpu if runs_on(logits) else sample
        tokens, log_probs = draw(logits, numbers[active, step % DRAWN], sampling.temperature)
        out.tokens[active, step] = tokens
        out.log_probs[active, step] = log_probs
        first = max(0, step + 1 - sampling.ends.window)
        going = sampling.ends.going(out.tokens[active, first : step + 1])
        out.lengths[active[~going]] = step + 1
        if step == steps - 1 or not lockstep.most(int(going.any())):
            break
        if not going.any():
            lockstep.idle()
            lockstep.follow(step + 1, steps)
            break
        if not going.all():
            kept = cache.keep(going.nonzero().squeeze(1))
            active, tokens = active[kept], tokens[kept]
            seen = None if seen is None else seen[kept]
        logits = decoder(tokens[:, None], _with_new(seen, step + 1), cache)
        if routes:
            routes.add(active, step)
    out = replace(out, routes=routes.collected(out.lengths)) if routes else out
    return replace(out, kept=sets.collected()) if sets else out


def _with_new(present: Tensor | None, new: int) -> Tensor | None:
    """Which tokens are no padding, bool ``[rows, length + new]``."""
    return None if present is None else torch.cat([present, present.new_ones(len(present), new)], 1)
