"""The head of training: time and memory of log-probs and entropy, beside plain PyTorch.

    python benchmarks/head.py [--rounds 5] [--save]

From hidden states of 1,024 tokens to log-probs and entropy, and back to the gradients of the hidden states
and of a matrix of 32,768 words, which are added to a float32 buffer. `torch`: linear, float(), log_softmax.
`kept`: hflow with all logits kept between the passes, and `tiled`: with tiles of them that are made twice, as
it does by itself where they exceed 128 MiB with all that is made of them. In turn, of one process with one
thread; medians of seconds, and the most MiB that torch's allocator holds beside matrix, buffer and hidden
states. `time` and `memory` are ratios to `torch`'s. Small sizes of the hidden states are mostly softmax; the
larger they are, the more the product that `tiled` makes again counts. The last line is one JSON object; with
--save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from step import machine
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

import hflow.runtime.engines.megatron  # noqa: F401  (before Megatron itself)
from hflow.plan import logits
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.predicted import predicted

ROOT = Path(__file__).resolve().parent
TOKENS, VOCAB = 1024, 32_768
HIDDEN = (256, 1024)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LOGITS_BYTES = {"kept": 16 * TOKENS * VOCAB, "tiled": logits.LOGITS_BYTES}


class PlainLayer:
    """One product, without Megatron's layer around it."""

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, weight)


@dataclass(frozen=True)
class Head:
    """`weight` has a float32 buffer `main_grad`, as Megatron's optimizer gives it."""

    hidden: Tensor
    weight: Any
    targets: Tensor

    @staticmethod
    def of(hidden: int, dtype: torch.dtype) -> Head:
        torch.manual_seed(0)
        weight: Any = (torch.randn(VOCAB, hidden) / hidden**0.5).to(dtype).requires_grad_()
        weight.main_grad = torch.zeros(VOCAB, hidden)
        states = torch.randn(TOKENS, hidden).to(dtype).requires_grad_()
        return Head(states, weight, torch.randint(VOCAB, (TOKENS,)))

    def plain(self) -> None:
        log_p = torch.nn.functional.linear(self.hidden, self.weight).float().log_softmax(-1)
        chosen = log_p.gather(1, self.targets[:, None])[:, 0]
        self._back(chosen, -(log_p.exp() * log_p).sum(-1))

    def ours(self, name: str) -> None:
        assert dist.group.WORLD
        layer: Any = PlainLayer()
        with patch.object(logits, "LOGITS_BYTES", LOGITS_BYTES[name]):
            matrix = OutputMatrix(layer, self.weight, dist.group.WORLD)
            self._back(*predicted(self.hidden, matrix, self.targets))

    def _back(self, log_prob: Tensor, entropy: Tensor) -> None:
        (log_prob.mean() + 0.01 * entropy.mean()).backward()
        if self.weight.grad is not None:
            self.weight.main_grad.add_(self.weight.grad)
        self.weight.grad = self.hidden.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description="Log-probs from hidden states: time and memory.")
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are taken, after one more")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/head-DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        found = {
            f"{dtype} {hidden}": measured(Head.of(hidden, DTYPES[dtype]), options.rounds)
            for dtype in DTYPES
            for hidden in HIDDEN
        }
    finally:
        dist.destroy_process_group()
    report = {"benchmark": "head", "tokens": TOKENS, "vocab": VOCAB, "rounds": options.rounds, **machine()}
    line = json.dumps({**report, "cases": found})
    if options.save:
        (ROOT / f"results/head-{report['date']}.json").write_text(line + "\n")
    print(line)


def measured(head: Head, rounds: int) -> dict[str, dict[str, float]]:
    """By contestant: median seconds, peak in MiB, and both beside torch's."""
    ways: dict[str, Callable[[], None]] = {
        "torch": head.plain,
        "kept": lambda: head.ours("kept"),
        "tiled": lambda: head.ours("tiled"),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - began)
    seconds = {name: median(each[1:]) for name, each in taken.items()}
    peaks = {name: peak_bytes(run) / 2**20 for name, run in ways.items()}
    return {
        name: {
            "s": round(seconds[name], 3),
            "mib": round(peaks[name], 1),
            "time": round(seconds[name] / seconds["torch"], 2),
            "memory": round(peaks[name] / peaks["torch"], 3),
        }
        for name in ways
    }


def peak_bytes(run: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events: list[Any] = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return int(torch.tensor([e.nbytes() for e in memory]).cumsum(0).max())


if __name__ == "__main__":
    main()
