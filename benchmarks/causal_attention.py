"""Attention of packed rows on CPUs, forward and backward, beside torch's fused kernel.

    python benchmarks/causal_attention.py [--rounds 15] [--save]

A layer of 4 heads of 64 dims that share 2 pairs of keys and values. hflow takes rows as they are in a pack, a
prompt once for its responses; torch takes each row whole, one length at a time, from tensors in the order in
which its kernel wants them: what it would cost to bring them there is not counted. On one thread, in turn;
medians of milliseconds, and how many times as fast hflow is. The last line is one JSON object; with --save it
also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from step import machine
from torch import Tensor

import hflow.runtime.engines.megatron  # noqa: F401  (before Megatron itself)
from hflow.runtime.engines.megatron.cpu_kernels.causal import attend_causally
from hflow.runtime.engines.megatron.prompt_groups import PromptGroups
from hflow.runtime.engines.megatron.sequences import Sequences

ROOT = Path(__file__).resolve().parent
HEADS, PAIRS, WIDTH, WARMUP = 4, 2, 64, 2
CASES = {  # prompts, their tokens, responses to each, and tokens of these that are read
    "32 rows of 63": (32, 32, 1, 31),
    "8 prompts of 32, 4 responses of 31": (8, 32, 4, 31),
    "8 prompts of 64, 8 responses of 64": (8, 64, 8, 64),
    "4 prompts of 256, 8 responses of 63": (4, 256, 8, 63),
    "4 rows of 512": (4, 256, 1, 256),
    "1 row of 2048": (1, 1024, 1, 1024),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
Pass = Callable[[], Tensor]


def rows_of(prompts: int, prompt: int, responses: int, response: int) -> Sequences:
    count = prompts * responses
    tokens = torch.zeros(count, prompt + response + 1, dtype=torch.int64)
    tokens[:, 0] = torch.arange(count) // responses
    return Sequences(tokens, torch.full((count,), prompt), torch.full((count,), response + 1))


def forward_and_backward(attend: Pass, inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    began = time.perf_counter()
    found = attend()
    between = time.perf_counter()
    torch.autograd.grad(found, inputs, torch.ones_like(found))
    return between - began, time.perf_counter() - between


def measure(sizes: tuple[int, int, int, int], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    groups = PromptGroups.of(rows_of(*sizes))
    rows, length = sizes[0] * sizes[2], sizes[1] + sizes[3]

    def made(shape: Callable[[int], tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        numbers = (torch.randn(*shape(n), WIDTH).to(dtype) for n in (HEADS, PAIRS, PAIRS))
        query, key, value = (x.requires_grad_() for x in numbers)
        return query, key, value

    own, theirs = made(lambda heads: (groups.tokens, heads)), made(lambda heads: (rows, heads, length))
    fused = torch.nn.functional.scaled_dot_product_attention
    sides: dict[str, tuple[Pass, tuple[Tensor, ...]]] = {
        "hflow": (lambda: attend_causally(*own, groups), own),
        "torch": (lambda: fused(*theirs, is_causal=True, enable_gqa=True), theirs),
    }
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(WARMUP + rounds):
        for side, contestant in sides.items():
            seconds[side].append(forward_and_backward(*contestant))
    found: dict[str, Any] = {}
    for side, each in seconds.items():
        forward, backward = (1e3 * median(part) for part in zip(*each[WARMUP:], strict=True))
        found |= {f"{side}_forward_ms": forward, f"{side}_backward_ms": backward}
    total = {side: found[f"{side}_forward_ms"] + found[f"{side}_backward_ms"] for side in sides}
    return found | {"speedup": total["torch"] / total["hflow"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention of packed rows.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="also write results/causal_attention-DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Any] = {}
    for kind, dtype in DTYPES.items():
        for name, sizes in CASES.items():
            one = cases[f"{kind}, {name}"] = measure(sizes, dtype, options.rounds)
            told = "  ".join(
                f"{side} {one[f'{side}_forward_ms']:6.2f} + {one[f'{side}_backward_ms']:6.2f} ms"
                for side in ("hflow", "torch")
            )
            print(f"{kind:4} {name:36} {told}  {one['speedup']:5.2f}", flush=True)
    result = {"benchmark": "causal_attention", "cases": cases, **machine()}
    line = json.dumps(result)
    if options.save:
        (ROOT / f"results/causal_attention-{result['date']}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
