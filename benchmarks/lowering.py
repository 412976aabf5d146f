"""What moves when HybridFlow's models go from training to generation, by whom it is lowered.

    python benchmarks/lowering.py [--save]

The transitions are those of the paper's figure 14 (arXiv:2409.19256), training p-t-d -> generation p_g-t_g,
in bf16 on its testbed. Compared, per GPU:

- ours: copies between the training mesh and the regrouped generation mesh;
- natural: the same lowering, but generation ranks in natural order, as without regrouping;
- swap: every rank of the natural mesh pulls its boxes from their first holders, wherever these are (what
  the refit of weights parameter by parameter does);
- V: HybridFlow-V gathers all weights over the t·p ranks of a replica: Table 2, (tp-1)/(tp) M;
- gather: DeepSpeed-Chat gathers all weights over all ranks: Table 2, (tpd-1)/(tpd) M.

`peak` counts the training weights and what is gathered, since both exist at once. Seconds are those of
`cost.redistribution` and `cost.comm`: of the busiest device's link plus the busiest host's NICs for copies,
of a ring for gathers. Also measured: how long it takes to lower. The last line is one JSON object; with
--save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hflow.compiler.lowering import lower_rows, lower_weights
from hflow.compiler.regroup import generation_mesh
from hflow.cost.comm import all_gather_s, axis_link, reached
from hflow.graph.types import Dim, Factor, ValueType
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.edges import Copy, CopySet
from hflow.plan.layout import Layout, Mesh, Replicate, Shard, intersect, volume
from hflow.plan.model_shape import ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import num_parameters, parameters, weight_boxes
from hflow.plan.reshard import by_box
from hflow.plan.sharding import Sharding

ROOT = Path(__file__).resolve().parent
TESTBED = load_cluster(ROOT.parent / "clusters/a100x128.yaml")
WIDTH = 2  # bf16
# By model: (p, t) of training and t_g of generation, whose p_g is 1.
TRANSITIONS = {
    "llama-7b": ((1, 8), 2),
    "llama-13b": ((1, 8), 4),
    "llama-34b": ((4, 8), 8),
    "llama-70b": ((8, 8), 8),
}
GPUS = (16, 32, 64, 96, 128)


@dataclass(frozen=True)
class Moved:
    """Bytes that the busiest GPU, a GPU on average and the busiest host receive; the greatest peak of a GPU;
    seconds."""

    most: float
    average: float
    host: float
    peak: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights from training to generation, lowered in five ways.")
    parser.add_argument("--save", action="store_true", help="also write results/lowering-DATE.json")
    options = parser.parse_args()
    report = {"benchmark": "lowering", "transitions": list(transitions()), "speed_s": dict(speeds())}
    line = json.dumps(report)
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"results/lowering-{date}.json").write_text(line + "\n")
    print(line)


def transitions() -> Iterator[dict[str, Any]]:
    """Print the table; its rows."""
    for name, ((pp, tp), tp_g) in TRANSITIONS.items():
        for count in (n for n in GPUS if n % (pp * tp) == 0):
            cluster = testbed(count)
            train = Mesh.of(cluster.devices, pp=pp, dp=count // (pp * tp), tp=tp)
            moved = lowerings(NAMED_SHAPES[name], train, tp_g, cluster)
            print_table(f"{name}  {pp}-{tp}-{train.dp} -> 1-{tp_g} on {count} GPUs", moved)
            found = {way: asdict(m) for way, m in moved.items()}
            model, micro = num_parameters(NAMED_SHAPES[name]) * WIDTH, pp * tp // tp_g
            found["table 2"] = {"received": model * (micro - 1) / (tp * pp), "peak": model / tp_g}
            ways = {way: rounded(numbers) for way, numbers in found.items()}
            yield {"model": name, "gpus": count, "train": (pp, tp, train.dp), "tp_g": tp_g, **ways}


def print_table(title: str, found: dict[str, Moved]) -> None:
    print(f"{title:<42}received: most     mean     host     peak   GB    time s")
    for way, moved in found.items():
        sizes = "".join(f"{n / 1e9:>9.2f}" for n in (moved.most, moved.average, moved.host, moved.peak))
        print(f"{way:>47}{sizes}{moved.seconds:>12.2f}")


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    """Whole bytes, seconds to a tenth of a millisecond."""
    return {name: round(n, 4) if name == "seconds" else round(n) for name, n in numbers.items()}


def testbed(gpus: int) -> Cluster:
    return replace(TESTBED, hosts=gpus // TESTBED.devices_per_host)


def lowerings(shape: ModelShape, train: Mesh, tp_g: int, cluster: Cluster) -> dict[str, Moved]:
    grouped = generation_mesh(train, tp_g)
    assert grouped
    gpus = cluster.num_devices
    natural = Mesh.of(cluster.devices, dp=gpus // tp_g, tp=tp_g)
    everything = Mesh.of(cluster.devices, dp=gpus)
    ends = (Sharding(train), Sharding(grouped)), (Sharding(train), Sharding(natural))
    ours, plain = (lower_weights(shape, "bf16", source, target, cluster) for source, target in ends)
    in_replicas = tuple(device for group in train.groups("pp", "tp") for device in group)
    replicas = Mesh.of(in_replicas, dp=train.dp, tp=train.pp * train.tp)
    return {
        "ours": copied(ours.copies, ours.peak_bytes, cluster),
        "natural": copied(plain.copies, plain.peak_bytes, cluster),
        "swap": copied(swap(shape, train, natural), plain.peak_bytes, cluster),
        "V": gathered(shape, replicas, "tp", cluster),
        "gather": gathered(shape, everything, "dp", cluster),
    }


def swap(shape: ModelShape, train: Mesh, target: Mesh) -> Iterator[CopySet]:
    """Each device of `target` gets its boxes from the first device of `train` that has (a part of) them."""
    for parameter in parameters(shape):
        holders = by_box(weight_boxes(shape, Sharding(train), parameter))
        held = {box: devices[0] for box, devices in holders.items()}
        needed = weight_boxes(shape, Sharding(target), parameter)
        parts = [(s, t, intersect(have, box)) for t, box in needed.items() for have, s in held.items()]
        copies = tuple(Copy(s, t, part) for s, t, part in parts if part and s != t)
        yield CopySet((parameter.name,), parameter.shape, "p2p", copies)


def copied(sets: Iterable[CopySet], peak: float, cluster: Cluster) -> Moved:
    """What copies cost: through each device's link and each host's NICs, in and out."""
    devices = {"in": Counter[int](), "out": Counter[int]()}
    hosts = {"in": Counter[int](), "out": Counter[int]()}
    for copy_set in sets:
        for copy in copy_set.copies:
            size = volume(copy.box) * WIDTH * len(copy_set.tensors)
            ends = {"in": copy.target, "out": copy.source}
            apart = cluster.host(copy.source) != cluster.host(copy.target)
            for way, device in ends.items():
                devices[way][device] += size
                hosts[way][cluster.host(device)] += size * apart
    link = reached(cluster, cluster.intra_host)
    nics = reached(cluster, cluster.inter_host, cluster.nics_per_host)
    busiest, entering = (max(max(c.values()) for c in both.values()) for both in (devices, hosts))
    seconds = busiest / link.bandwidth + link.latency_s
    if entering:
        seconds += entering / nics.bandwidth + nics.latency_s
    got = devices["in"]
    return Moved(
        max(got.values()), sum(got.values()) / cluster.num_devices, max(hosts["in"].values()), peak, seconds
    )


def gathered(shape: ModelShape, mesh: Mesh, axis: str, cluster: Cluster) -> Moved:
    """All weights on every device, by a ring over `axis`: of each ring on a host, one device receives from
    outside, all but the host's own parts."""
    model, ranks = num_parameters(shape) * WIDTH, mesh.size(axis)
    entering = 0.0
    for group in mesh.groups(axis):
        here = Counter(map(cluster.host, group))
        entering = max(entering, *((ranks - members) / ranks * model for members in here.values()))
    each = model * (ranks - 1) / ranks
    seconds = all_gather_s(model, ranks, axis_link(cluster, mesh, axis))
    return Moved(each, each, entering, model + model / ranks, seconds)


def speeds() -> Iterator[tuple[str, float]]:
    """Seconds to lower one edge (of weights: the best of three times), by what it is."""
    dense, experts = NAMED_SHAPES["llama-70b"], NAMED_SHAPES["qwen3-235b-a22b"]
    for gpus in (128, 1024, 4096):
        train = Mesh.of(tuple(range(gpus)), pp=8, dp=gpus // 64, tp=8)
        grouped = generation_mesh(train, 8)
        assert grouped
        yield f"llama-70b on {gpus}", weights_s(dense, Sharding(train), Sharding(grouped), testbed(gpus))
    train, read = Mesh.of(tuple(range(128)), pp=2, dp=8, tp=8), Mesh.of(tuple(range(128)), dp=16, tp=8)
    ends = Sharding(train, ep=8), Sharding(read, ep=8)
    yield "qwen3-235b-a22b ep8 on 128", weights_s(experts, *ends, testbed(128))
    rows = ValueType("i32", (Dim((Factor("batch", 4096, "prompts"),)),))
    wide, narrow = Mesh.of(tuple(range(1024)), dp=1024), Mesh.of(tuple(range(1024)), dp=512, tp=2)
    source, target = (Layout(mesh, (Replicate(), Shard(0), Replicate())) for mesh in (wide, narrow))
    gc.collect()
    began = time.perf_counter()
    lower_rows((rows,), source, target, testbed(1024))
    yield "rows of dp1024 to dp512", round(time.perf_counter() - began, 4)


def weights_s(shape: ModelShape, source: Sharding, target: Sharding, cluster: Cluster) -> float:
    took: list[float] = []
    parameters(shape)  # made once for all edges of a model
    for _ in range(3):
        lower_weights.cache_clear()
        gc.collect()
        began = time.perf_counter()
        lower_weights(shape, "bf16", source, target, cluster)
        took.append(time.perf_counter() - began)
    return round(min(took), 4)


if __name__ == "__main__":
    main()
