"""Products of few rows with the weights of a model, as in decoding, beside torch's.

    python benchmarks/few_rows.py [--rounds 15] [--save]

All projections of 4 layers, one after the other, so that weights come from memory as they do in a token:
layers of 256 (2.9 MB of float32 each), and of 896, the width of Qwen2.5 0.5B. On one thread, hflow and torch
in turn; medians of microseconds per layer, and how many times as fast hflow is. The last line is one JSON
object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from step import machine
from torch import Tensor

import hflow.runtime.engines.megatron  # noqa: F401  (before Megatron itself)
from hflow.runtime.engines.megatron.cpu_kernels.linear import linear

ROOT = Path(__file__).resolve().parent
LAYERS, WARMUP = 4, 3
WIDTHS = {  # of a layer's projections: outputs and inputs
    256: ((512, 256), (256, 256), (1376, 256), (256, 688)),
    896: ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
}
ROWS = (1, 2, 4, 8, 16, 32, 64)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
SIDES = {"hflow": linear, "torch": torch.nn.functional.linear}


def measure(weights: list[Tensor], rows: int, rounds: int) -> dict[str, Any]:
    given = [torch.randn(rows, weight.shape[1]).to(weight.dtype) for weight in weights]
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(WARMUP + rounds):
        for side, product in SIDES.items():
            began = time.perf_counter()
            for x, weight in zip(given, weights, strict=True):
                product(x, weight)
            seconds[side].append(time.perf_counter() - began)
    found = {f"{side}_us": 1e6 * median(each[WARMUP:]) / LAYERS for side, each in seconds.items()}
    return found | {"speedup": found["torch_us"] / found["hflow_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Products of few rows.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="also write results/few_rows-DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        for width, shapes in WIDTHS.items():
            weights = [torch.randn(shape).to(dtype) for _ in range(LAYERS) for shape in shapes]
            for rows in ROWS:
                one = cases[f"{name}, {width}, {rows} rows"] = measure(weights, rows, options.rounds)
                told = f"hflow {one['hflow_us']:8.0f} µs  torch {one['torch_us']:8.0f} µs"
                print(f"{name:5} {width:4} {rows:3} rows  {told}  {one['speedup']:5.2f}", flush=True)
    result = {"benchmark": "few_rows", "cases": cases, **machine()}
    line = json.dumps(result)
    if options.save:
        (ROOT / f"results/few_rows-{result['date']}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
