"""What checkpoints cost the steps of a run, and what they take on the disk.

    python benchmarks/checkpoint.py [--pairs 5] [--checkpoints 8] [--plans NAME ...] [--save]

`stalls`: GRPO with a model whose state is 150 MB, on one worker and on two that share the state of the
optimizer (ZeRO-1); and one-step-off-policy GRPO, whose checkpoints hold older weights, too. Of each
checkpoint but the first, `stall_s` (for how long the slowest worker did nothing else) and `write_s` are
what `events.jsonl` says. Beside them, just before and after the run, by as many processes at once, each
with its share of the bytes: `memcpy_s` copies them to memory that was written before, `fresh_memcpy_s`
to memory that the kernel must give first, as a snapshot must; `disk_s` writes them to a file in the same
folder and waits until the disk has them (fsync). Medians. `state_bytes` is the sum over the tensors that
the plan's run carries (hflow/plan/run_state.py), `file_bytes` the size of a checkpoint's files.

`overhead`: the GRPO run of `make demo` (its model untrained, so that all answers have the greatest
length), with `run.checkpoint.every: 10` and with `checkpoint: false` in turn, one pair after the other
on the same workers. A block is ten steps from the end of one to the end of another, so that each has one
checkpoint, its stall and its writing. `ratio`: of the median blocks of a pair, the median over pairs;
`ratios` are all of them. `cpu_ratio` is that of the CPU seconds of whole runs, which waiting for a core
does not change.

Other processes on the machine disturb every figure here. The last line is one JSON object; with --save
it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console

import hflow
from hflow.graph.run_config import CheckpointPolicy, RunConfig
from hflow.plan.plan import Plan
from hflow.plan.run_state import run_state
from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.tools.new_model import new_model

LOCAL = LocalRay()  # before Ray is imported

from hflow.runtime.controller.ray_pool import RayPool  # noqa: E402
from hflow.runtime.execute import execute  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
BLOCK = 10  # steps
BLOCKS = 3
EVERY = 2  # steps between checkpoints whose stall is measured
REPETITIONS = 5
ITEM_BYTES = {"f32": 4, "bf16": 2, "i64": 8, "i32": 4, "bool": 1}
GRPO, ASYNC = "algorithms/grpo.yaml", "algorithms/async_grpo.yaml"
ALONE = ("rollout=tp1@0", "ref_logprobs=tp1@0", "actor_train=tp1@0")
PLANS: dict[str, tuple[str, Sequence[str]]] = {
    "one worker": (GRPO, ALONE),
    "dp2 zero1": (GRPO, ("rollout=dp2@0-1", "ref_logprobs=dp2@0-1", "actor_train=dp2,zero1@0-1")),
    "one worker, older weights": (ASYNC, (*ALONE, "actor_logprobs=tp1@0")),
}

Event = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="What checkpoints cost the steps of a run.")
    parser.add_argument("--pairs", type=int, default=5, help="runs with and without checkpoints")
    parser.add_argument("--checkpoints", type=int, default=8, help="whose stall is measured")
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=PLANS, metavar="NAME")
    parser.add_argument("--save", action="store_true", help="also write results/checkpoint-DATE.json")
    options = parser.parse_args()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=ROOT) as name:
        folder = Path(name)
        pool = RayPool([WORKERS], LOCAL)
        try:
            stalls = [measure_stalls(pool, plan, options.checkpoints, folder) for plan in options.plans]
            overhead = measure_overhead(pool, options.pairs, folder) if options.pairs else None
        finally:
            pool.close()
    report = {
        "benchmark": "checkpoint",
        "stalls": stalls,
        "overhead": overhead,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "niceness": os.nice(0),
        "torch": torch.__version__,
        "date": date,
    }
    line = json.dumps(report)
    if options.save:
        (ROOT / f"benchmarks/results/checkpoint-{date}.json").write_text(line + "\n")
    print(line)


def measure_stalls(pool: RayPool, name: str, checkpoints: int, folder: Path) -> dict[str, Any]:
    """The row of a plan, printed too."""
    model = folder / "model"
    if not model.exists():
        new_model(model, layers=7, hidden=384, heads=6, ffn=1024)
    plan = compiled(*PLANS[name], model, EVERY * (1 + checkpoints), batch=8, minibatch=64, holdout=8)
    size, workers = state_bytes(plan), len(plan.devices)
    before = machine(size // workers, workers, folder)
    events = executed(pool, plan, folder, CheckpointPolicy(every=EVERY, keep=1, on_signal=False))
    after = machine(size // workers, workers, folder)
    found = [event for event in events if event["event"] == "checkpoint"][1:]
    row: dict[str, Any] = {"plan": name, "workers": workers, "checkpoints": len(found)}
    row |= {key: median(event[key] for event in found) for key in ("stall_s", "write_s")}
    row |= {key: median(before[key] + after[key]) for key in before}
    row["step_s"] = median(end - start for start, end in pairwise(step_ends(events)))
    row |= {"state_bytes": size, "file_bytes": found[-1]["bytes"]}
    row = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
    print(row, flush=True)
    return row


def measure_overhead(pool: RayPool, pairs: int, folder: Path) -> dict[str, Any]:
    """Of the demo's GRPO run."""
    model = folder / "demo"
    new_model(model, layers=3, hidden=128, heads=4, ffn=352, alphabet="0123456789+=")
    plan = compiled(GRPO, (), model, BLOCK * (BLOCKS + 1))
    kinds = {"without": CheckpointPolicy(on_signal=False), "with": CheckpointPolicy(every=BLOCK)}
    blocks: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    checkpoints: list[Event] = []
    for number in range(pairs):
        for kind in sorted(kinds, reverse=number % 2 == 0):
            began = cpu_s()
            events = executed(pool, plan, folder, kinds[kind])
            cpu[kind].append(cpu_s() - began)
            ends = step_ends(events)[BLOCK - 1 :: BLOCK]
            blocks[kind].append(median(end - start for start, end in pairwise(ends)))
            checkpoints += [event for event in events if event["event"] == "checkpoint"]
            print(f"pair {number} {kind:<8}{blocks[kind][-1] / BLOCK:7.4f} s per step", flush=True)
    ratios, cpu_ratios = (
        [a / b for a, b in zip(each["with"], each["without"], strict=True)] for each in (blocks, cpu)
    )
    return {
        "ratio": round(median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "cpu_ratio": round(median(cpu_ratios), 4),
        "cpu_ratios": [round(ratio, 3) for ratio in cpu_ratios],
        "step_s": {kind: round(median(each) / BLOCK, 4) for kind, each in blocks.items()},
        "stall_s": round(median(event["stall_s"] for event in checkpoints), 4),
        "every": BLOCK,
        "state_bytes": state_bytes(plan),
        "file_bytes": checkpoints[-1]["bytes"],
    }


def compiled(graph: str, pins: Sequence[str], model: Path, steps: int, **params: int) -> Plan:
    given = {"model": model, "steps": steps, **params}
    loaded = hflow.load(ROOT / graph, [f"params.{name}={value}" for name, value in given.items()])
    return hflow.compile(loaded, "local4" if pins else "local", pins)


def executed(pool: RayPool, plan: Plan, folder: Path, policy: CheckpointPolicy) -> list[Event]:
    """The events of a run."""
    run, config = folder / "run", RunConfig(policy, export="none")
    execute(plan, run, pool=pool, console=Console(quiet=True), config=config)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    shutil.rmtree(run)
    return events


def step_ends(events: Sequence[Event]) -> list[float]:
    """When the last worker ended each step."""
    ends: dict[int, float] = {}
    for event in (event for event in events if event["event"] == "ran"):
        ends[event["step"]] = max(ends.get(event["step"], 0.0), event["end_s"])
    return [ends[step] for step in sorted(ends)]


def cpu_s() -> float:
    """CPU seconds of Ray and its workers so far."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def state_bytes(plan: Plan) -> int:
    """Of the tensors whose shapes the plan knows, which here are all."""
    tensors = run_state(plan)
    assert all(size is not None for tensor in tensors for size in tensor.shape)
    return sum(ITEM_BYTES[t.dtype] * math.prod(size or 0 for size in t.shape) for t in tensors)


def machine(size: int, processes: int, folder: Path) -> dict[str, list[float]]:
    """Seconds that as many `processes` at once take for `size` bytes each, the slowest of them."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.SimpleQueue()
    ranks = [
        context.Process(target=on_rank, args=(size, folder / f"{rank}.raw", barrier, results), daemon=True)
        for rank in range(processes)
    ]
    for process in ranks:
        process.start()
    found = [results.get() for _ in ranks]
    for process in ranks:
        process.join()
    return {key: [max(each) for each in zip(*(times[key] for times in found))] for key in found[0]}


def on_rank(size: int, file: Path, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def write() -> None:
        with file.open("wb", buffering=0) as opened:
            opened.write(source.numpy().data)
            os.fsync(opened.fileno())

    actions: dict[str, Callable[[], Any]] = {
        "memcpy_s": lambda: target.copy_(source),
        "fresh_memcpy_s": source.clone,
        "disk_s": write,
    }
    found: dict[str, list[float]] = {key: [] for key in actions}
    for _ in range(REPETITIONS):
        for key, action in actions.items():
            file.unlink(missing_ok=True)
            barrier.wait()
            began = time.perf_counter()
            action()
            found[key].append(time.perf_counter() - began)
    file.unlink()
    results.put(found)


if __name__ == "__main__":
    main()
