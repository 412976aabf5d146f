"""How well the cost model predicts public measurements of training, generation and PPO.

    python benchmarks/cost_model.py [--fit] [--save]

The rows of benchmarks/data/{training,generation}.csv are split by a fixed rule: rows 0, 2, 4, … of each file
may be fitted to, the others are held out. `--fit` searches the few constants on the former and prints
what it finds beside what the cluster files say (`device.calibration`, `kernel_latency`, the latency of
`intra_host`); without it nothing is fitted, and the constants are those of the cluster files. PPO is all
prediction, and so is the way of HybridFlow's actor from training to generation. The last line is one JSON
object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import log
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

from benchmarks.paper import wake_up_s
from hflow.cost.comm import all_gather_s, reached
from hflow.cost.compute import node_time_s
from hflow.cost.resident_memory import resident_bytes
from hflow.cost.working_memory import working_bytes
from hflow.graph.ir import OpKind
from hflow.plan import logits
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload

ROOT = Path(__file__).resolve().parent
CLUSTERS = ROOT.parent / "clusters"
# HybridFlow's setting (arXiv:2409.19256, section 8.1), and its layouts of figure 14 by model: (p, t), t_g.
PROMPT, RESPONSE, ROWS, UPDATES = 1024, 1024, 1024, 8
READ = Workload(ROWS, PROMPT, RESPONSE)
TRAIN = Workload(ROWS, PROMPT, RESPONSE, optimizer_steps=UPDATES, rows_per_update=ROWS // UPDATES)
LAYOUTS = {"7B": ((1, 8), 2), "13B": ((1, 8), 4), "34B": ((4, 8), 8)}
ZERO = Strategy(zero=1)
Row = dict[str, str]
Clusters = dict[str, Cluster]


@dataclass(frozen=True)
class Result:
    """One row: what was measured and what the model says, in tokens/s (of the transition: seconds)."""

    label: str
    measured: float
    predicted: float
    held_out: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost model beside public measurements.")
    parser.add_argument("--fit", action="store_true", help="search the constants on the rows to fit")
    parser.add_argument("--save", action="store_true", help="also write results/cost_model-DATE.json")
    options = parser.parse_args()
    clusters = shipped_clusters()
    if options.fit:
        print_fit(clusters)
    line = json.dumps(report(clusters))
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"results/cost_model-{date}.json").write_text(line + "\n")
    print(line)


def shipped_clusters() -> Clusters:
    """The measured devices. A100-40: the same chip with half the memory, at 1.555 TB/s by its data sheet. The
    A100s of llm-foundry's rows have 1,600 Gb/s between hosts, unlike HybridFlow's."""
    a100, h100 = load_cluster(CLUSTERS / "a100x8.yaml"), load_cluster(CLUSTERS / "h100x8.yaml")
    a100 = replace(a100, nics_per_host=8)
    small = replace(a100.device, memory_bytes=40 * 10**9, reserve_bytes=4 * 10**9, memory_bandwidth=1.555e12)
    return {"A100-80": a100, "A100-40": replace(a100, device=small), "H100-80": h100}


def report(clusters: Clusters) -> dict[str, Any]:
    """Print the tables; the mean absolute errors of each in percent."""
    train = [result(i, r, "tokens_per_s_per_gpu", training, clusters) for i, r in enumerate(rows("training"))]
    made = [
        result(i, r, "output_tokens_per_s", generation, clusters) for i, r in enumerate(rows("generation"))
    ]
    ppo = list(ppo_results())
    moved = list(transition_results())
    tables = {"training": train, "generation": made, "PPO of HybridFlow": ppo, "transition (s)": moved}
    for title, results in tables.items():
        print_table(title, results)
    return {
        "benchmark": "cost_model",
        "train": split_errors(train),
        "generate": split_errors(made),
        "ppo_small": {"mape": mape(ppo)},
        "transition": {"mape": mape(moved)},
    }


def rows(name: str) -> list[Row]:
    lines = (ROOT / f"data/{name}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def result(
    index: int, row: Row, measured: str, predict: Callable[[Row, Clusters], float], clusters: Clusters
) -> Result:
    label = "  ".join(f"{v:>7}" for k, v in row.items() if k not in (measured, "mfu"))
    return Result(label, float(row[measured]), predict(row, clusters), index % 2 == 1)


def training(row: Row, clusters: Clusters) -> float:
    """Tokens/s of a GPU: FSDP over all GPUs, which keeps float32 weights and gathers bf16 copies of one
    layer after the other, and keeps all logits; micro-batch unknown, so the largest that fits."""
    with patch.object(logits, "LOGITS_BYTES", sys.maxsize):
        return _training(row, clusters)


def _training(row: Row, clusters: Clusters) -> float:
    cluster, gpus, length = clusters[row["gpu"]], int(row["gpus"]), int(row["seq_len"])
    mesh, shape = Mesh.of(tuple(range(gpus)), dp=gpus), mpt(row["model_params_b"])
    strategy = Strategy("full" if row["activation_ckpt"] == "yes" else "none", zero=3)
    free = cluster.device.usable_bytes - resident_bytes(shape, "f32", mesh, True, strategy)

    def work(micro_batch: int) -> Workload:
        batch = 8 * gpus * micro_batch  # the update is a small part of so large a batch
        return Workload(batch, 0, length, optimizer_steps=1, rows_per_update=batch)

    def fits(micro_batch: int) -> bool:
        needed = working_bytes("train", shape, "bf16", work(micro_batch), mesh, micro_batch, strategy)
        return needed <= free

    best = max(filter(fits, range(1, 33)))
    seconds = node_time_s("train", shape, "bf16", work(best), mesh, best, cluster, strategy)
    return work(best).rows * length / gpus / seconds


def mpt(billions: str) -> ModelShape:
    """MPT has a plain MLP of width 4h: as many parameters as a gated one of 8/3·h."""
    sizes = {"7": (32, 4096, 32), "13": (40, 5120, 40), "30": (48, 7168, 64), "70": (80, 8192, 64)}
    layers, hidden, heads = sizes[billions]
    return ModelShape(
        "llama", layers, hidden, heads, heads, hidden // heads, 8 * hidden // 3, vocab=50_368,
        max_positions=65_536, rope_theta=1e4, norm_eps=1e-5, tied=True, qkv_bias=False,
    )  # fmt: skip


def generation(row: Row, clusters: Clusters) -> float:
    """Output tokens/s of one replica, whose whole batch fits (one wave)."""
    batch, tp, new = int(row["batch"]), int(row["tp"]), int(row["output_len"])
    shape = NAMED_SHAPES[f"llama-{row['model'].lower()}"]
    work, mesh = Workload(batch, int(row["input_len"]), new), Mesh.of(tuple(range(tp)), tp=tp)
    return batch * new / node_time_s("generate", shape, "bf16", work, mesh, batch, clusters["A100-80"])


def ppo_results() -> Iterator[Result]:
    for row in rows("ppo_small"):
        cluster, shape = of_row(row)
        predicted = ppo_tokens_per_s(shape, *layouts(row["model"], cluster), cluster)
        yield Result(row_label(row), float(row["hybridflow"]), predicted, held_out=True)


def transition_results() -> Iterator[Result]:
    for row in rows("transition"):
        cluster, shape = of_row(row)
        train, generate = layouts(row["model"], cluster)
        predicted = _transition_s(shape, cluster, train, generate, _free(shape, train, cluster))
        yield Result(row_label(row), float(row["hybridflow"]), predicted, held_out=True)


def of_row(row: Row) -> tuple[Cluster, ModelShape]:
    cluster = load_cluster(CLUSTERS / f"a100x{row['gpus']}.yaml")
    return cluster, NAMED_SHAPES[f"llama-{row['model'].lower()}"]


def row_label(row: Row) -> str:
    return f"{row['model']:>7}  {row['gpus']:>3} GPUs"


def ppo_tokens_per_s(shape: ModelShape, train: Mesh, generate: Mesh, cluster: Cluster) -> float:
    """Prompt and response tokens per second. All models are read and trained on `train`."""
    scalar, free = shape.with_head("scalar"), _free(shape, train, cluster)
    wave = _wave(shape, generate, free)
    seconds = _transition_s(shape, cluster, train, generate, free)
    seconds += node_time_s("generate", shape, "bf16", READ, generate, wave, cluster)
    seconds += sum(_best_s("score", s, train, cluster, free) for s in (shape, scalar, scalar))
    seconds += sum(_best_s("train", s, train, cluster, free) for s in (shape, scalar))
    return ROWS * (PROMPT + RESPONSE) / seconds


def _free(shape: ModelShape, train: Mesh, cluster: Cluster) -> int:
    """What the state of two trained and two frozen models leaves of a device."""
    models = (shape, shape.with_head("scalar"))
    held = (resident_bytes(s, "bf16", train, trains, ZERO) for s in models for trains in (True, False))
    return cluster.device.usable_bytes - sum(held)


def layouts(model: str, cluster: Cluster) -> tuple[Mesh, Mesh]:
    """The training and generation layouts of the paper's figure 14."""
    (pp, tp), generate_tp = LAYOUTS[model]
    count = cluster.num_devices
    train = Mesh.of(cluster.devices, pp=pp, dp=count // (pp * tp), tp=tp)
    return train, Mesh.of(cluster.devices, dp=count // generate_tp, tp=generate_tp)


def _wave(shape: ModelShape, generate: Mesh, free: int) -> int:
    """The most rows whose cache fits beside the generation weights."""
    left = free - resident_bytes(shape, "bf16", generate, False)
    return max(b for b in _micro_batches(generate) if _needs("generate", shape, generate, b, ZERO) <= left)


def _transition_s(shape: ModelShape, cluster: Cluster, train: Mesh, generate: Mesh, free: int) -> float:
    """The trained weights are gathered inside hosts, into an engine that wakes up; its cache has what is left
    of the memory."""
    gathered = train.pp * train.tp // generate.tp
    local = resident_bytes(shape, "bf16", generate, False)
    seconds = all_gather_s(local, gathered, reached(cluster, cluster.intra_host))
    return seconds + wake_up_s(shape, generate, free - local, cluster)


def _best_s(op: OpKind, shape: ModelShape, mesh: Mesh, cluster: Cluster, free: int) -> float:
    """The fastest micro-batch that fits, with full recomputation where it helps."""
    work = TRAIN if op == "train" else READ
    strategies = (ZERO, Strategy("full", zero=1)) if op == "train" else (ZERO,)
    return min(
        node_time_s(op, shape, "bf16", work, mesh, micro_batch, cluster, strategy)
        for micro_batch, strategy in product(_micro_batches(mesh), strategies)
        if _needs(op, shape, mesh, micro_batch, strategy) <= free
    )


def _needs(op: OpKind, shape: ModelShape, mesh: Mesh, rows: int, strategy: Strategy) -> int:
    return working_bytes(op, shape, "bf16", TRAIN if op == "train" else READ, mesh, rows, strategy)


def _micro_batches(mesh: Mesh) -> list[int]:
    share = ROWS // mesh.dp
    return [share // 2**i for i in range(share.bit_length())]


def print_table(title: str, results: Iterable[Result]) -> None:
    digits = 2 if title.endswith("(s)") else 0
    print(f"{title}\n{'measured':>62}{'predicted':>11}{'error':>9}")
    for r in results:
        use = "held out" if r.held_out else "fit"
        print(f"  {r.label:<50}{r.measured:>10,.{digits}f}{r.predicted:>11,.{digits}f}{r.error:>9.1%}  {use}")
    print()


def mape(results: Iterable[Result]) -> float:
    """Mean absolute error, percent."""
    return round(100 * mean(abs(r.error) for r in results), 2)


def squared(results: Iterable[Result]) -> float:
    return mean(log(r.predicted / r.measured) ** 2 for r in results)


def split_errors(results: list[Result]) -> dict[str, float]:
    held_out = [r for r in results if r.held_out]
    return {"fit_mape": mape(r for r in results if not r.held_out), "heldout_mape": mape(held_out)}


def print_fit(clusters: Clusters) -> None:
    """The constants with the least squared error (of logarithms) on the rows to fit, by grid search."""
    data = rows("training")[::2]
    for kind, shipped in (("A100", clusters["A100-80"]), ("H100", clusters["H100-80"])):
        own = [r for r in data if r["gpu"].startswith(kind)]
        shares = [i / 100 for i in range(40, 81)]
        error = lambda s, own=own: training_error(own, clusters, s)  # noqa: E731
        calibration = shipped.device.calibration
        print(f"{kind}: train_efficiency {min(shares, key=error)} (file: {calibration.train_efficiency})")
    data = rows("generation")[::2]
    grid = product(
        (0.55, 0.6, 0.65, 0.7, 0.75), (0.7, 0.75, 0.8, 0.85), (2e-6, 3e-6, 4e-6, 5e-6), (5e-6, 1e-5, 1.5e-5)
    )
    prefill, decode, kernel, link = min(grid, key=lambda c: generation_error(data, clusters["A100-80"], *c))
    print(f"A100: prefill_efficiency {prefill}, decode_bandwidth_efficiency {decode},", end=" ")
    print(f"kernel_latency {kernel}, latency of intra_host {link}\n")


def training_error(data: list[Row], clusters: Clusters, share: float) -> float:
    changed = {name: calibrated(c, train_efficiency=share) for name, c in clusters.items()}
    return squared(result(0, r, "tokens_per_s_per_gpu", training, changed) for r in data)


def generation_error(
    data: list[Row], cluster: Cluster, prefill: float, decode: float, kernel: float, link: float
) -> float:
    changed = calibrated(cluster, prefill_efficiency=prefill, decode_bandwidth_efficiency=decode)
    device = replace(changed.device, kernel_latency_s=kernel)
    changed = replace(changed, device=device, intra_host=replace(cluster.intra_host, latency_s=link))
    return squared(result(0, r, "output_tokens_per_s", generation, {"A100-80": changed}) for r in data)


def calibrated(cluster: Cluster, **shares: float) -> Cluster:
    device = cluster.device
    return replace(cluster, device=replace(device, calibration=replace(device.calibration, **shares)))


if __name__ == "__main__":
    main()
