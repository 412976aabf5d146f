"""Milliseconds of reduce-scatters and all-gathers between processes of one host: hflow's and gloo's own.

    python benchmarks/sent_parts.py [--numbers 3000000] [--ranks 2] [--rounds 40] [--save]

Each rank, of one thread, has so many float32 numbers, of which it keeps or gives its part, as ZeRO-1 does
with gradients and weights. The collectives take turns; ours and gloo's results are compared, and times are
medians of rank 0. The last line is one JSON object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from step import machine
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.runtime.engines.megatron.gloo_collectives import all_gather, reduce_scatter

ROOT = Path(__file__).resolve().parent
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Parts that ranks send each other, beside gloo's own way.")
    parser.add_argument("--numbers", type=int, default=3_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", action="store_true", help="also write results/sent_parts-DATE.json")
    options = parser.parse_args()
    context, numbers = multiprocessing.get_context("spawn"), options.numbers // options.ranks * options.ranks
    found: SimpleQueue[dict[str, float]] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = options.ranks, numbers, options.rounds, f"{folder}/store", found
        ranks = [context.Process(target=measure, args=(rank, *given)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")
    milliseconds = found.get()
    for name, each in milliseconds.items():
        print(f"{name:24}{each:8.2f} ms")
    made = {"ranks": options.ranks, "numbers": numbers, "milliseconds": milliseconds}
    result = machine() | {"benchmark": "sent_parts"} | made
    line = json.dumps(result)
    if options.save:
        (ROOT / f"results/sent_parts-{result['date']}.json").write_text(line + "\n")
    print(line)


def measure(
    rank: int, ranks: int, numbers: int, rounds: int, store: str, found: SimpleQueue[dict[str, float]]
) -> None:
    """What one rank does; the first hands the medians out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    ways: dict[str, tuple[Callable[..., Any], bool]] = {
        "reduce-scatter, hflow": (reduce_scatter, False),
        "reduce-scatter, gloo": (dist.reduce_scatter_tensor, False),
        "all-gather, hflow": (all_gather, True),
        "all-gather, gloo": (dist.all_gather_into_tensor, True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP + rounds):
        results: dict[str, torch.Tensor] = {}
        for name, (collective, gathers) in ways.items():
            whole = torch.randn(numbers, generator=torch.Generator().manual_seed(ranks * number + rank))
            part = whole.tensor_split(ranks)[rank]
            dist.barrier()
            started = time.perf_counter()
            collective(*((whole, part) if gathers else (part, whole)))
            times[name].append(time.perf_counter() - started)
            results[name] = whole if gathers else part
        for kind in ("reduce-scatter", "all-gather"):
            torch.testing.assert_close(results[f"{kind}, hflow"], results[f"{kind}, gloo"])
    if rank == 0:
        found.put({name: round(1e3 * median(own[WARM_UP:]), 2) for name, own in times.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
