"""Seconds, received bytes and peak memory of weights that go from training to generation, on gloo.

    python benchmarks/reshard.py [--repetitions 9] [--cases NAME ...] [--save]

257 MiB of fp32 weights of a llama in Megatron's own layout, in 4 or 8 processes of one thread. hflow's exact
copies are read straight out of the other processes' memory, as between workers of one CPU host; "hflow over
sockets" sends them, as where that is not allowed. Beside them: gathering everything and slicing, HybridFlow's
all-gather per parameter in micro data-parallel groups, DTensor's redistribute, and Megatron's
swap_model_weights (resharding/peers.py). All end in the same devices' generation layout, and every result is
compared with the weights in one process. Repetitions of all ways are interleaved.

Seconds: of the slowest rank, the median and the minimum over repetitions. Received bytes: what the kernel
counted on the TCP connections of the busiest process (Linux), with gloo's own headers, and what it copied out
of other processes; `bound_bytes` is what
that process needs and does not hold. Peak: the source weights of the busiest process and all that torch's
allocator gave out besides at once, the generation weights included. `all_gather_gib_per_s`: what a rank
receives in a plain all-gather of 32 MiB per rank. `copy_s`: what all processes take to write their generation
weights from memory of their own, without a word to each other: no way that writes them takes less.
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
from collections.abc import Callable, Set
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from resharding.peers import WAYS, Action, Case, GPTModel
from resharding.usage import most_allocated, received
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from hflow.compiler.lowering import UnloweredWeightEdge
from hflow.compiler.regroup import generation_mesh
from hflow.plan.cluster import Cluster, DeviceKind, Link
from hflow.plan.layout import Box, Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import num_parameters
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.groups import make_groups
from hflow.runtime.engines.megatron.build import build_model
from hflow.runtime.engines.megatron.weights import MegatronWeights
from hflow.runtime.worker.move_weights import move_weights
from hflow.runtime.worker.route import make_route
from hflow.runtime.worker.world import Peers, World

ROOT = Path(__file__).resolve().parent
CPU = torch.device("cpu")
SHAPE = ModelShape("llama", 4, 1024, 16, 16, 64, 2752, 8192, 64, 1e4, 1e-6, False, False)
LINK = Link(1e9, 1e-4)
# (pp, dp, tp) of training, (pp, tp) of generation
CASES = {
    "TP4->TP2": ((1, 1, 4), (1, 2)),
    "TP2DP4->TP1DP8": ((1, 4, 2), (1, 1)),
    "TP4PP2->TP2PP2": ((2, 1, 4), (2, 2)),
    "TP4PP2->TP2PP1": ((2, 1, 4), (1, 2)),
}
OURS = "hflow"


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights from training to generation, in five ways.")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--save", action="store_true", help="also write results/reshard-DATE.json")
    options = parser.parse_args()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    report = {
        "benchmark": "reshard",
        "cases": [measure(name, options.repetitions) for name in options.cases],
        "model_bytes": 4 * num_parameters(SHAPE),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "date": date,
    }
    line = json.dumps(report)
    if options.save:
        (ROOT / f"results/reshard-{date}.json").write_text(line + "\n")
    print(line)


def measure(name: str, repetitions: int) -> dict[str, Any]:
    """Run a case in processes of its own, print its table, and give its row."""
    (pp, dp, tp), _ = CASES[name]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (pp * dp * tp, name, f"{folder}/store", repetitions, results)
        ranks = [
            context.Process(target=on_rank, args=(r, *arguments), daemon=True) for r in range(pp * dp * tp)
        ]
        for process in ranks:
            process.start()
        while results.empty() and all(process.exitcode in (None, 0) for process in ranks):
            time.sleep(0.1)
        if results.empty():
            raise SystemExit(f"{name}: a process failed")
        found = results.get()
        for process in ranks:
            process.join()
    print_table(found)
    return found


def print_table(case: dict[str, Any]) -> None:
    print(f"{case['name']}, {case['procs']} processes; bound {case['bound_bytes'] / 2**20:.1f} MiB; ", end="")
    print(
        f"all-gather {case['all_gather_gib_per_s']:.2f} GiB/s; plan {case['plan_s'] * 1e3:.1f} ms once; ",
        end="",
    )
    print(f"to write the result from own memory {case['copy_s']:.4f} s")
    for way, found in {OURS: case["ours"], **case["peers"]}.items():
        sizes = f"{found['bytes'] / 2**20:9.1f} MiB received{found['peak_bytes'] / 2**20:9.1f} MiB peak"
        print(f"  {way:<24}{found['s']:8.4f} s (least {found['min_s']:.4f}){sizes}", flush=True)


def on_rank(rank: int, size: int, name: str, store: str, repetitions: int, results: Any) -> None:
    torch.set_num_threads(1)
    world = World.join(FileStore(store, size), rank, size, CPU)
    (pp, dp, tp), (pp_g, tp_g) = CASES[name]
    train = Mesh.of(tuple(range(size)), pp=pp, dp=dp, tp=tp)
    generate = generation_mesh(train, tp_g, pp_g)
    assert generate
    case = make_case(train, generate, rank, world)
    ours, bound, plan_s = hflow_way(case, world.neighbours.pairs)
    actions: dict[str, Action] = {OURS: ours, f"{OURS} over sockets": hflow_way(case, frozenset())[0]}
    actions |= {way: action for way, prepare in WAYS.items() if (action := prepare(case))}
    costs = {way: first_run(case, way, action) for way, action in actions.items()}
    copies = [(p.data, p.data.clone()) for p in case.models[1].parameters()]
    seconds: dict[str, list[float]] = {way: [] for way in actions}
    copying: list[float] = []
    for _ in range(repetitions):
        for way, action in actions.items():
            seconds[way].append(slowest(action))
        copying.append(slowest(lambda: [mine.copy_(own) for mine, own in copies]))
    found = {w: {"s": median(t), "min_s": min(t), **costs[w]} for w, t in seconds.items()}
    row = {
        "name": name,
        "procs": size,
        "bound_bytes": bound,
        "plan_s": plan_s,
        "all_gather_gib_per_s": raw(size),
        "copy_s": median(copying),
    }
    if rank == 0:
        results.put({**row, "ours": found.pop(OURS), "peers": found})
    world.close()


def make_case(train: Mesh, generate: Mesh, rank: int, world: World) -> Case:
    models = make_model(train, rank, world), make_model(generate, rank, world)
    source, target = (
        MegatronWeights(m, SHAPE, Sharding(mesh), rank) for m, mesh in zip(models, (train, generate))
    )
    for name in source.names():
        source.write(name, source.box(name), expected(name, source.shapes[name], source.box(name)))
    return Case(SHAPE, train, generate, models, source, target, world)


def make_model(mesh: Mesh, rank: int, world: World) -> GPTModel:
    groups = make_groups(Sharding(mesh), rank, world.group)
    assert groups
    return build_model(SHAPE, mesh, "f32", groups, CPU)


def expected(name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """The part of a parameter in `box`: numbers that tell its elements apart, and it from the others."""
    numbers = torch.arange(torch.Size(shape).numel()).mul_(len(name) + sum(map(ord, name))) % 65521
    return numbers.view(shape)[tuple(slice(*span) for span in box)].float()


def hflow_way(case: Case, readable: Set[tuple[int, int]]) -> tuple[Action, int, float]:
    """The action, what the busiest device must receive, and seconds to make this rank's route.

    Args:
        readable: pairs of a rank and another whose memory it reads.
    """
    size = case.world.size
    cluster = Cluster("here", DeviceKind("cpu", "cpu", 1e11, 4 * 10**9, 1e10, 0.5, 1e-4), 1, size, LINK, LINK)
    ends = Sharding(case.train), Sharding(case.generate)
    edge = UnloweredWeightEdge("weights", "train", "generate", SHAPE, "f32", *ends).lowered(cluster)
    ranks = tuple(range(size))
    peers, began = Peers(ranks, case.world.group(ranks)), time.perf_counter()
    rank = case.world.rank
    route = make_route(edge.copies, SHAPE, case.source, case.target, rank, readable=readable)
    plan_s = time.perf_counter() - began

    def action() -> None:
        move_weights(route, case.source, case.target, torch.float32, case.world, peers)

    return action, edge.lower_bound_bytes_per_device, plan_s


def first_run(case: Case, way: str, action: Action) -> dict[str, int]:
    """Check what `action` brings; bytes received and held."""
    action()  # connections are made, plans that are kept are made
    case.target.release()
    dist.barrier()
    before = received()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        if way != "DTensor":  # it makes tensors of its own
            case.target.allocate()
            for name in case.target.names():
                case.target.view(name, case.target.box(name)).zero_()
        brought = action()
    bytes_ = received() - before
    case.target.allocate()
    check(case, way, brought)
    held = sum(p.nbytes for p in case.models[0].parameters())
    most = torch.tensor([bytes_, held + most_allocated(measured)])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(("bytes", "peak_bytes"), most.tolist()))


def check(case: Case, way: str, brought: Any) -> None:
    """Every element of this rank's generation weights."""
    if way == "DTensor":
        halves = [half for name, parameter in case.models[1].named_parameters() for half in
                  (parameter.data.chunk(2) if "linear_fc1" in name else (parameter.data,))]  # fmt: skip
        for half, tensor in zip(halves, brought, strict=True):
            half.copy_(tensor)
    for name in case.target.names():
        box = case.target.box(name)
        if not torch.equal(case.target.read(name, box), expected(name, case.target.shapes[name], box)):
            raise SystemExit(f"{way}: {name} is wrong on rank {case.world.rank}")


def slowest(action: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def raw(size: int) -> float:
    """GiB/s that a rank receives of a plain all-gather."""
    mine, all_ = torch.zeros(2**23), torch.empty(size * 2**23)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
    took = [slowest(lambda: all_gather(all_, mine)) for _ in range(5)]
    return (size - 1) * mine.nbytes / 2**30 / median(took)


if __name__ == "__main__":
    main()
