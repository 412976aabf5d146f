"""Training on one long row: losses, time and memory of a worker alone and of two that cut the row.

    python benchmarks/long_context.py [--tokens 8192,16384,32768] [--save]

A small model of random weights learns a row of so many random tokens by heart, with recompute, on CPU
workers of one thread each: alone, and two in context parallelism (cp2). `losses` are those of two updates;
`apart`, how far those of cp2 are from the lone worker's, relative to these. `mib`: the most that torch's
allocator holds on a worker in one update, beside weights and optimizer; `kib_per_token` is that by the row's
tokens, the same for all lengths where memory grows with the length alone. `s`: seconds of that update,
profiled. The last line is one JSON object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from head import peak_bytes
from step import machine

import hflow
from hflow.plan.plan import Plan
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.rows import Rows, from_lists
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import new_model

ROOT = Path(__file__).resolve().parent
TOKENS = "8192,16384,32768"
LAYOUTS = {"alone": "tp1,recompute@0", "cp2": "cp2,recompute@0-1"}
PROMPT, UPDATES = 1024, 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Training on one long row, alone and cut in two.")
    parser.add_argument("--tokens", default=TOKENS, help=f"lengths of the row, {TOKENS}")
    parser.add_argument("--save", action="store_true", help="also write results/long_context-DATE.json")
    options = parser.parse_args()
    lengths = sorted(int(length) for length in options.tokens.split(","))
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 128}
        new_model(model, **sizes, kv_heads=1, max_positions=lengths[-1])
        cases = {str(length): measured(model, length) for length in lengths}
    report = {"benchmark": "long_context", **sizes, **machine(), "cases": cases}
    line = json.dumps(report)
    if options.save:
        (ROOT / f"results/long_context-{report['date']}.json").write_text(line + "\n")
    print(line)


def measured(model: str, length: int) -> dict[str, Any]:
    found = {name: trained(planned(model, length, pin), length) for name, pin in LAYOUTS.items()}
    alone, cut = (found[name]["losses"] for name in LAYOUTS)
    apart = max(abs(mine / theirs - 1) for mine, theirs in zip(cut, alone))
    return {**found, "apart": float(f"{apart:.1e}")}


def planned(model: str, length: int, pin: str) -> Plan:
    """Of `algorithms/sft.yaml`, with one example per step."""
    response = length - PROMPT
    lengths = [
        f"nodes.examples.with.max_{what}_tokens={n}"
        for what, n in (("prompt", PROMPT), ("response", response))
    ]
    graph = hflow.load(
        ROOT.parent / "algorithms/sft.yaml",
        [f"params.model={model}", "params.batch=1", f"params.steps={UPDATES}", *lengths],
    )
    return hflow.compile(graph, "local", [f"actor_train={pin}"])


def trained(plan: Plan, length: int) -> dict[str, Any]:
    """Losses, and of the worker that needs most of each, memory and time of an update."""
    context = multiprocessing.get_context("spawn")
    ranks = len(plan.node("actor_train").mesh.devices)
    with tempfile.TemporaryDirectory() as folder, context.Pool(ranks) as pool:
        store = (Path(folder) / "store").as_uri()
        found = pool.starmap(
            train, [(rank, ranks, store, plan, length) for rank in range(ranks)], chunksize=1
        )
    losses, peaks, seconds = zip(*found)
    mib = max(peaks) / 2**20
    return {
        "losses": max(losses),  # of the one rank that reports them
        "mib": round(mib, 1),
        "kib_per_token": round(mib * 2**10 / length, 2),
        "s": round(max(seconds), 1),
    }


def train(rank: int, ranks: int, store: str, plan: Plan, length: int) -> tuple[list[float], int, float]:
    """As one of `ranks` workers: the losses, unless another reports them; peak bytes and seconds of the last
    update."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    try:
        own, node = plan.node("actor_train"), plan.graph.node("actor_train")
        new_group: Any = functools.cache(lambda members: dist.new_group(list(members)))
        source = plan.graph.models[0]
        engine = MegatronModel(
            source, plan.shapes[source.name], own.sharding, rank, new_group, load_tokenizer(source.path),
            torch.device("cpu"), node.options, own.strategy,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(length)
        tokens = from_lists([torch.randint(3, 90, (length,), generator=generator).tolist()])
        mask = Rows(torch.ones(length - PROMPT, dtype=torch.bool), torch.tensor([length - PROMPT]))
        losses: list[float] = []

        def update(step: int) -> None:
            call = EngineCall(node, own, 0, 1, seed=0, step=step, steps=UPDATES)
            metrics = engine.run(call, {"tokens": tokens, "mask": mask}).metrics
            if "loss" in metrics:
                losses.append(metrics["loss"][0])

        for step in range(UPDATES - 1):
            update(step)
        began = time.perf_counter()
        peak = peak_bytes(lambda: update(UPDATES - 1))
        return losses, peak, time.perf_counter() - began
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
