"""Time of generation: prompts are bound by compute, new tokens by memory or compute (roofline).

Rows are generated in waves of as many as the KV cache holds. A wave reads its prompts once, then makes
tokens one by one. Each step multiplies by all weights, which takes the larger of reading them and of the
products; reads the keys and values of all rows so far; and waits for kernels and all-reduces. With
pipeline stages a wave is cut into as many parts, which follow each other through the stages.

Where lengths are stated, rows end at lengths of their own (`rows_in_flight`), and a step has those that are
left; the last steps have few rows, and take hardly less time for that.

What techniques that no engine has would change (`plan/techniques.py`) is priced in the same terms.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from hflow.cost.device import BYTES, attention_work, layer_latency_s, products_s, residual_s, stream_s
from hflow.cost.execution import Execution
from hflow.cost.experts import padding_flops
from hflow.cost.rows_in_flight import partial_rows_in_flight, rows_in_flight
from hflow.graph.lengths import Lengths
from hflow.plan.engine_registry import profile_of
from hflow.plan.flops import (
    head_parameters,
    latent_flops,
    matmul_parameters,
    read_parameters,
    repeated_parameters,
)


def generate_s(run: Execution) -> float:
    """Seconds for all rows, wave after wave."""
    work, wave = run.work, run.micro_batch
    waves = ceil(work.rows / run.mesh.dp / wave)
    if not run.strategy.kv_cache:
        return waves * _reread_s(run)
    if work.varies:
        return _prompts_s(run) + _responses_s(run)
    samples = work.samples_on_one(run.mesh.dp)
    return waves * (prefill_s(run, wave / samples, work.prompt) + decode_s(run))


def _prompts_s(run: Execution) -> float:
    """Reading the prompts of all rows, of as many at once as rows are in flight. A wave is padded to its
    longest prompt. Replicas that share a prompt read it each."""
    work, rows = run.work, run.work.rows / run.mesh.dp
    samples = work.samples_on_one(run.mesh.dp)
    together = min(rows, run.micro_batch) / samples
    length = work.mean_prompt
    if work.prompts and not profile_of(run.strategy.engine).refills:
        length = work.prompts.longest_of(together)
    return rows / samples / together * prefill_s(run, together, length)


def _responses_s(run: Execution) -> float:
    """All new tokens of all rows, until the last replica's last row has ended."""
    work, refills = run.work, profile_of(run.strategy.engine).refills
    lengths = work.responses or Lengths(work.response, work.response)
    rows, prompt, again_s = work.rows / run.mesh.dp, work.mean_prompt, 0.0
    if partial := run.cluster.techniques.partial_rollouts:
        flight, left = partial_rows_in_flight(lengths, rows, run.micro_batch, partial.begun)
        again_s = prefill_s(run, left, prompt + flight[0].tokens)  # with the weights of the next step
    else:
        sharing = run.strategy.sharing_replicas(run.mesh.tp)
        flight = rows_in_flight(lengths, rows, run.micro_batch, refills, run.mesh.dp, sharing)
    return again_s + sum(p.steps * _token_s(run, p.rows / run.mesh.pp, prompt + p.tokens) for p in flight)


def _reread_s(run: Execution) -> float:
    """All new tokens of a wave without a KV cache: for each one everything before it is read again."""
    work = run.work
    rows = run.micro_batch * work.mean_response / work.response / run.mesh.pp
    step_s = prefill_s(run, rows, work.prompt + work.mean_response / 2) + run.cluster.token_step_s
    return work.response * step_s


def prefill_s(run: Execution, prompts: float, length: float) -> float:
    """Reading `prompts` prompts of `length` tokens; only their last positions have logits."""
    shape, device, tokens = run.shape, run.device, prompts * length
    repeated = repeated_parameters(shape, run.mesh.tp)
    flops = 2 * (matmul_parameters(shape) + repeated - head_parameters(shape)) * tokens
    flops += 2 * head_parameters(shape) * prompts + attention_work(shape, tokens, length / 2)
    sharing = run.strategy.sharing_replicas(run.mesh.tp)
    flops += padding_flops(shape, tokens, sharing, device)
    weights = read_parameters(shape, tokens, sharing) + repeated
    seconds = products_s(flops, weights, "prefill", run.dtype, device, run.mesh.tp)
    seconds += residual_s(shape, tokens, run.dtype, device)
    return seconds + shape.num_layers * layer_latency_s(device, "prefill") + _messages_s(run, prompts, tokens)


def decode_s(run: Execution) -> float:
    """All new tokens of a wave of rows of the greatest lengths."""
    work = run.work
    return work.response * _token_s(run, run.micro_batch / run.mesh.pp, work.prompt + work.response / 2)


def _token_s(run: Execution, rows: float, context: float) -> float:
    """One new token for each of `rows` rows, which are a part of those in flight where there are pipeline
    stages; they have `context` tokens before it. With speculation, a step makes several."""
    host_s = profile_of(run.strategy.engine).token_step_s(run.device.platform) + run.cluster.token_step_s
    speculation = run.cluster.techniques.speculation
    if speculation is None:
        return _read_s(run, rows, 1, context) + host_s
    draft = replace(run, shape=replace(run.shape, num_layers=1, moe=None, window=None))
    drafts_s = speculation.drafted * _read_s(draft, rows, 1, context)
    return (drafts_s + _read_s(run, rows, speculation.drafted + 1, context) + host_s) / speculation.made


def _read_s(run: Execution, rows: float, new: int, context: float) -> float:
    """Reading `new` tokens of each of `rows` rows, whose `context` tokens before them are in the KV cache."""
    shape, device, tokens = run.shape, run.device, rows * new
    repeated = repeated_parameters(shape, run.mesh.tp)
    flops = 2 * (matmul_parameters(shape) + repeated) * tokens + latent_flops(shape, tokens, context)
    weights = read_parameters(shape, tokens, run.strategy.sharing_replicas(run.mesh.tp)) + repeated
    products = products_s(flops, weights, "decode", run.dtype, device, run.mesh.tp)
    read = rows * shape.seen(context) * shape.kv_bytes_per_token(BYTES[run.dtype], run.mesh.tp)
    cache = stream_s(read, device)
    latency = shape.num_layers * layer_latency_s(device, "decode")
    return products + cache + latency + _messages_s(run, tokens, tokens)


def _messages_s(run: Execution, sampled: float, tokens: float) -> float:
    """Inside all stages, between them, and before and after them; `sampled` of the `tokens` have logits."""
    between_s = (run.mesh.pp - 1) * run.hop_s(tokens)
    return run.messages_s(tokens) + between_s + run.sampling_messages_s(sampled, tokens)
