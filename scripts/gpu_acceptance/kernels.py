"""Time per decoded token and of a training step, and the ten kernels that take most of each."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hflow.plan.flops import attention_flops, head_parameters, matmul_parameters
from hflow.plan.strategy import PLAIN
from hflow.runtime.ends import EndRule
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.megatron.generate import Sampling, generate
from hflow.runtime.rows import from_lists
from scripts.gpu_acceptance.models import alone, engine, large_model
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main
from scripts.gpu_acceptance.update import ADAM, train

LONGEST, LOGGED = 10, 60
DECODED = {  # (rows, prompt tokens), and new tokens
    "cuda": ([(1, 256), (16, 256), (64, 256), (16, 4096)], 200),
    "cpu": ([(4, 16)], 8),
}
TRAINED = {"cuda": (32, 1024, 256, 8), "cpu": (4, 32, 16, 2)}  # rows, tokens, of these responses, micro-batch
RUNS = 3


def run(setting: Setting) -> Figures:
    folder, world = large_model(setting), alone(setting)
    model = engine(world, folder, "bf16", dict(ADAM))
    figures: Figures = {"milliseconds_per_decoded_token": _decoded(setting, model)}
    (rows, prompt), *_ = reversed(DECODED[setting.device.type][0])
    figures["decode_kernels"] = _longest(setting, lambda: _decode(model, rows, prompt, 9))
    figures |= _trained(setting, model)
    world.close()
    if not setting.on_gpu:
        raise Skipped("these are operators of this CPU, not kernels", figures)
    return figures


def _decoded(setting: Setting, model: MegatronModel) -> dict[str, float]:
    """By number of rows and length of their prompts."""
    cases, new = DECODED[setting.device.type]
    found: dict[str, float] = {}
    for rows, prompt in cases:
        _decode(model, rows, prompt, 9)  # the first has kernels to load
        timed = [partial(_decode, model, rows, prompt, number) for number in (1, 1 + new)]
        seconds = [_timed(setting, each) for each in timed]
        found[f"{rows} x {prompt}"] = 1e3 * (seconds[1] - seconds[0]) / new
    return found


def _decode(model: MegatronModel, rows: int, prompt: int, new: int) -> None:
    prompts = from_lists([[3 + i % 10 for i in range(prompt)]])
    sampling = Sampling(new, 1.0, seed=0, step=0, stream=0, ends=EndRule(-1))  # no row ends early
    generate(model.model, prompts, torch.arange(rows), sampling, rows, model.device)


def _trained(setting: Setting, model: MegatronModel) -> Figures:
    """A whole step: forward, backward and the update."""
    rows, length, response, micro_batch = TRAINED[setting.device.type]
    draw = random.Random(0)
    tokens = [[draw.randrange(3, 200) for _ in range(length)] for _ in range(rows)]

    def step() -> None:
        train(model, tokens, [response] * rows, PLAIN, micro_batch)

    step()
    seconds = median(_timed(setting, step) for _ in range(RUNS))
    head, body = head_parameters(model.shape), matmul_parameters(model.shape) - head_parameters(model.shape)
    needed = 3 * (
        2 * body * rows * length
        + 2 * head * rows * response
        + attention_flops(model.shape, rows * length, length / 2)
    )
    return {
        "train_seconds": seconds,
        "train_mfu": needed / seconds / setting.cluster.device.flops,
        "train_kernels": _longest(setting, step),
    }


def _timed(setting: Setting, action: Callable[[], None]) -> float:
    with setting.timed() as seconds:
        action()
    return seconds()


def _longest(setting: Setting, action: Callable[[], None]) -> list[dict[str, Any]]:
    """Names, number of calls, milliseconds."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    with profile(activities=activities) as profiled:
        action()
        setting.wait()
    events: list[Any] = list(profiled.key_averages())
    taken = (lambda e: e.self_device_time_total) if setting.on_gpu else (lambda e: e.self_cpu_time_total)
    longest = sorted(events, key=taken, reverse=True)
    told = [{"name": e.key[:80], "calls": e.count, "milliseconds": round(taken(e) / 1e3, 3)} for e in longest]
    print(*told[:LOGGED], sep="\n", file=sys.stderr)
    return told[:LONGEST]


if __name__ == "__main__":
    main(run)
