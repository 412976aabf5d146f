"""Seconds and bytes of weights of which a share has changed, sent whole and as changes, on gloo.

    python benchmarks/delta_weights.py [--repetitions 9] [--shares 0.01 0.05] [--save]

257 MiB of bf16 weights of a llama in Megatron's own layout go from one process of one thread to another, over
loopback. Before each transfer another part of the weights changes, a share of all. Both ways are taken in
turn, and the reader's weights are compared with the trainer's after each.

`whole`, `changed`: median seconds, and bytes that the reader got. `compute_s`: what finding and writing
changes took, that is all that `changed` took beyond its bytes at the rate of `whole`. `pays_below_gbit_s`: on
slower networks changes are faster than the whole. `plan_s`: `compute_s` as a plan for these processes has it.
The last line is one JSON object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.compiler.lowering import UnloweredWeightEdge
from hflow.cost.redistribution import RECEIVED_PASSES, SENT_PASSES
from hflow.plan.cluster import Cluster, DeviceKind, Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import num_parameters
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.groups import make_groups
from hflow.runtime.engines.megatron.build import build_model
from hflow.runtime.engines.megatron.weights import MegatronWeights
from hflow.runtime.worker.changed_weights import SentWeights
from hflow.runtime.worker.move_weights import move_weights
from hflow.runtime.worker.route import make_route
from hflow.runtime.worker.world import Peers, World

ROOT = Path(__file__).resolve().parent
CPU = torch.device("cpu")
SHAPE = ModelShape("llama", 8, 1024, 16, 16, 64, 2752, 16384, 64, 1e4, 1e-6, False, False)
TRAINER, READER = Mesh.of((0,)), Mesh.of((1,))


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights sent whole, and changed ones alone.")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.01, 0.05])
    parser.add_argument("--save", action="store_true", help="also write results/delta_weights-DATE.json")
    options = parser.parse_args()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    report = {
        "benchmark": "delta_weights",
        "shares": measured(options.shares, options.repetitions),
        "model_bytes": 2 * num_parameters(SHAPE),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "date": date,
    }
    line = json.dumps(report)
    if options.save:
        (ROOT / f"results/delta_weights-{date}.json").write_text(line + "\n")
    print(line)


def measured(shares: list[float], repetitions: int) -> list[dict[str, Any]]:
    """A row for each share."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (shares, f"{folder}/store", repetitions, results)
        ranks = [context.Process(target=on_rank, args=(r, *arguments), daemon=True) for r in range(2)]
        for process in ranks:
            process.start()
        while results.empty() and all(process.exitcode in (None, 0) for process in ranks):
            time.sleep(0.1)
        if results.empty():
            raise SystemExit("a process failed")
        found: list[dict[str, Any]] = results.get()
        for process in ranks:
            process.join()
    for row in found:
        times = f"whole {row['whole_s']:.3f} s, changed {row['changed_s']:.3f} s"
        computing = f"of which computing {row['compute_s']:.3f} s (plan {row['plan_s']:.3f})"
        print(f"{row['share']:.0%}: {times}, {computing}; pays below {row['pays_below_gbit_s']:.1f} Gb/s")
    return found


def on_rank(rank: int, shares: list[float], store: str, repetitions: int, results: Any) -> None:
    torch.set_num_threads(1)
    world = World.join(FileStore(store, 2), rank, 2, CPU)
    weights = [made(mesh, rank, world) for mesh in (TRAINER, READER)]
    rows = [measure(share, repetitions, weights[0], weights[1], world) for share in shares]
    if rank == READER.devices[0]:
        results.put(rows)
    world.close()


def made(mesh: Mesh, rank: int, world: World) -> MegatronWeights | None:
    groups = make_groups(Sharding(mesh), rank, world.group)
    if groups is None:
        return None
    torch.manual_seed(0)
    return MegatronWeights(build_model(SHAPE, mesh, "bf16", groups, CPU), SHAPE, Sharding(mesh), rank)


def measure(
    share: float,
    repetitions: int,
    source: MegatronWeights | None,
    target: MegatronWeights | None,
    world: World,
) -> dict[str, Any]:
    """Of the reader; a number of changes that neither way has seen lies before each transfer."""
    link = Link(1e9, 1e-4)
    cluster = Cluster("here", DeviceKind("cpu", "cpu", 1e11, 4 * 10**9, 1e10, 0.5, 1e-4), 2, 1, link, link)
    ends = Sharding(TRAINER), Sharding(READER)
    edge = UnloweredWeightEdge("weights", "train", "generate", SHAPE, "bf16", *ends).lowered(cluster)
    peers, route = (
        Peers((0, 1), world.group((0, 1))),
        make_route(edge.copies, SHAPE, source, target, world.rank),
    )
    sent = SentWeights()
    seconds: dict[str, list[float]] = {"whole": [], "changed": []}
    size: dict[str, int] = {}
    move_weights(route, source, target, torch.bfloat16, world, peers, sent)  # all, as at first
    for _ in range(repetitions):
        for way in seconds:
            if source:
                change(source, share)
            dist.barrier()
            began = time.perf_counter()
            with_ = sent if way == "changed" else None
            received = move_weights(route, source, target, torch.bfloat16, world, peers, with_)
            dist.barrier()
            seconds[way].append(time.perf_counter() - began)
            size[way] = received.values + received.told
            compare(source, target)
            if way == "whole" and source:  # for the next: what the reader has
                sent.keep((m for p in route.phases for m in p.messages()), source, torch.bfloat16)
    whole_s, changed_s = (median(seconds[way]) for way in ("whole", "changed"))
    if not target:
        return {}
    compute_s = changed_s - size["changed"] * whole_s / size["whole"]
    here = load_cluster("local").device.memory_bandwidth
    return {
        "share": share,
        "whole_s": whole_s,
        "whole_bytes": size["whole"],
        "changed_s": changed_s,
        "changed_bytes": size["changed"],
        "compute_s": compute_s,
        "plan_s": (SENT_PASSES + RECEIVED_PASSES) * size["whole"] / here,
        "pays_below_gbit_s": 8e-9 * (size["whole"] - size["changed"]) / compute_s,
    }


def change(weights: MegatronWeights, share: float) -> None:
    """Move a share of all weights, drawn anew, by one in their last bits."""
    for name in weights.names():
        bits = weights.view(name, weights.box(name)).view(torch.int16)
        chosen = torch.rand(bits.shape) < share
        bits.add_(chosen.to(torch.int16))


def compare(source: MegatronWeights | None, target: MegatronWeights | None) -> None:
    """Raises AssertionError unless the reader has what the trainer has."""
    weights = source or target
    assert weights
    for name in weights.names():
        mine = weights.read(name, weights.box(name)).contiguous().view(torch.int16)
        whole = mine.clone()
        dist.broadcast(whole.view(torch.bfloat16), TRAINER.devices[0])
        assert torch.equal(whole, mine), name


if __name__ == "__main__":
    main()
