"""Time per decoded token and in a training step, and the ten kernels that take most of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hflow.plan.strategy import PLAIN
from hflow.runtime.ends import EndRule
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.megatron.generate import Sampling, generate
from hflow.runtime.rows import from_lists
from scripts.gpu_acceptance.models import alone, engine, large_model
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main
from scripts.gpu_acceptance.update import ADAM, MICRO_BATCH, update

LONGEST = 10
SIZES = {"cuda": (16, 256, 64), "cpu": (4, 16, 8)}  # rows, prompt tokens, new tokens


def run(setting: Setting) -> Figures:
    folder, world = large_model(setting), alone(setting)
    model = engine(world, folder, "bf16", dict(ADAM))
    rows, prompt, new = SIZES[setting.device.type]
    _decode(model, rows, prompt, 2)  # the first has kernels to load
    seconds = [_timed(setting, lambda n=n: _decode(model, rows, prompt, n)) for n in (1, 1 + new)]
    figures: Figures = {
        "milliseconds_per_decoded_token": 1e3 * (seconds[1] - seconds[0]) / new,
        "decode_kernels": _longest(setting, lambda: _decode(model, rows, prompt, 1 + new // 8)),
    }
    tokens = [[3 + i % 10 for i in range(2 * prompt)] for _ in range(MICRO_BATCH)]

    def train() -> None:
        update(model, tokens, [prompt] * len(tokens), PLAIN)

    figures["train_kernels"] = _longest(setting, train)
    world.close()
    if not setting.on_gpu:
        raise Skipped("these are operators of this CPU, not kernels", figures)
    return figures


def _decode(model: MegatronModel, rows: int, prompt: int, new: int) -> None:
    prompts = from_lists([[3 + i % 10 for i in range(prompt)]] * rows)
    sampling = Sampling(new, 1.0, seed=0, step=0, stream=0, ends=EndRule(-1))  # no row ends early
    generate(model.model, prompts, torch.arange(rows), sampling, rows, model.device)


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
    longest = sorted(events, key=taken, reverse=True)[:LONGEST]
    return [{"name": e.key[:80], "calls": e.count, "milliseconds": round(taken(e) / 1e3, 3)} for e in longest]


if __name__ == "__main__":
    main(run)
