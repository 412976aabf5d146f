"""What the controller costs per step, by the number of workers.

    python benchmarks/dispatch.py [--workers 1,2,4,8,16,32,64] [--steps 40] [--save]

`hflow.runtime.execute` runs PPO with four models, all on all workers, on real Ray actors that compute
nothing: each knows the plan and answers a step at once with the report that a worker of that plan would give.
So what is measured is the controller that users run, from the call to the lines in the run folder. In
milliseconds per step, for each number of workers:

- `step`: `execute`: one call per worker and step; reports are merged and written;
- `calls`: those calls alone;
- `instructions`: instead, one call per instruction and worker, sent ahead like steps: a controller that
  dispatches every operation by itself. Their reports are empty.

`wall` includes the workers, who share this machine's cores with the controller: an upper bound. `cpu` is that
of the controller's process with all threads (Ray's among them). Both are taken between the ends of steps, so
that what starts and ends a run is left out: the median of `wall`, the mean of `cpu`.

At 1,024 workers, `cpu` is read from the line through the measured ones over the number of workers by least
squares: every part of a step is done once per worker. `rms` and `worst` are the line's residuals. The last
line is one JSON object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from rich.console import Console

import hflow
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan
from hflow.plan.program import Activity, SyncWeights, Transfer
from hflow.plan.program import Call as NodeCall
from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.execute import execute
from hflow.runtime.tools.new_model import new_model

LOCAL = LocalRay()  # before Ray is imported

import psutil  # noqa: E402
import ray  # noqa: E402

from hflow.runtime.controller.pool import WorkerCall  # noqa: E402
from hflow.runtime.controller.ray_pool import RayPool  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
WARM = 3  # steps left out: the first of a kind cost more
WAYS = ("step", "calls", "instructions")
FAR = 1024
MODELS = ("actor_train", "critic_train", "rollout", "reward", "values", "ref_logprobs")

Report = dict[str, Any]
Cost = dict[str, float]


class LightWorker:
    """Answers like a worker, and computes nothing; no torch is imported."""

    def __init__(self, device: str, threads: int, folder: str):
        self.rank = 0
        self.report: Report = {}

    def ready(self) -> tuple[int, float, int]:
        return os.getpid(), psutil.Process().create_time(), -1

    def leave(self) -> Report:
        return {}

    @ray.method(concurrency_group="control")
    def last_act(self) -> None:
        """There are no servers to end."""

    def join_at(self, host: str, port: int, generation: int, rank: int, size: int, secret: bytes) -> Report:
        self.rank = rank
        return {}

    def load(self, plan: Plan) -> Report:
        self.report = typical_report(plan, self.rank)
        return {}

    def run(self, step: int, evaluation: bool = False) -> Report:
        now = time.time()
        events = [{**event, "step": step, "start_s": now, "end_s": now} for event in self.report["events"]]
        return {**self.report, "events": events}

    def instruct(self, number: int) -> Report:
        """Instruction `number`, when the controller sends each by itself."""
        return {}

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """There is nothing to give up."""

    @ray.method(concurrency_group="control")
    def where(self) -> str:
        return ""


class MeasuredPool(RayPool):
    """Notes the time and its process's CPU time, in seconds, when the reports of a call are there."""

    marks: list[tuple[float, float]]

    def stream(self, calls: Iterable[WorkerCall]) -> Iterator[list[Report]]:
        self.marks = []
        for reports in super().stream(calls):
            self.marks.append((time.perf_counter(), time.process_time()))
            yield reports


def typical_report(plan: Plan, rank: int) -> Report:
    """What a worker says after a step: an event of each of its instructions, each output's mean."""
    mine = [i for i in plan.step.instructions if rank in i.devices and isinstance(i, Activity)]
    names = [plan.step.edges[i.edge].name if isinstance(i, Transfer | SyncWeights) else i.node for i in mine]
    events = [
        {"kind": i.op, "name": name, "device": rank, "bytes": 0} for i, name in zip(mine, names, strict=True)
    ]
    nodes = [plan.graph.node(i.node) for i in mine if isinstance(i, NodeCall)]
    metrics = {f"{node.name}.{output.port}": (1.0, 1.0) for node in nodes for output in node.outputs}
    for node in (n for n in nodes if n.op == "train"):
        metrics |= {f"{node.name}.{name}": (1.0, 1.0) for name in ("loss", "grad_norm", "kl", "clipped")}
    return {"metrics": metrics, "digests": {"rollout": rank}, "events": events, "tokens": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description="The controller's time per step by the number of workers.")
    parser.add_argument("--workers", default="1,2,4,8,16,32,64", help="numbers of workers, up to 64")
    parser.add_argument("--steps", type=int, default=40, help="steps measured")
    parser.add_argument("--save", action="store_true", help="also write results/dispatch-DATE.json")
    options = parser.parse_args()
    counts = [int(count) for count in options.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="dispatch-") as folder:
        pool = MeasuredPool([max(counts)], LOCAL, worker=LightWorker)
        try:
            rows = list(measured(pool, counts, options.steps, Path(folder)))
        finally:
            pool.close()
    report = {"benchmark": "dispatch", "cores": os.cpu_count(), "rows": rows, **at_far(rows)}
    line = json.dumps(report)
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"benchmarks/results/dispatch-{date}.json").write_text(line + "\n")
    print(line)


def measured(pool: MeasuredPool, counts: Sequence[int], steps: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Print and yield a row for each number of workers."""
    new_model(folder / "model", layers=2, hidden=32)
    for count in counts:
        plan = compiled(count, folder / "model", WARM + steps)
        row: dict[str, Any] = {"workers": count, "program": len(plan.step.instructions)}
        row["step"] = executed(pool, plan, folder / str(count))
        row["calls"] = dispatched(pool, [("run", 0, False)], steps)
        program = [("instruct", number) for number in range(row["program"])]
        row["instructions"] = dispatched(pool, program, steps // 4)
        print(json.dumps(row), flush=True)
        yield row


def compiled(count: int, model: Path, steps: int) -> Plan:
    """PPO, every model data-parallel over all workers."""
    given = {"model": model, "reward_model": model, "steps": steps, "batch": 256, "minibatch": 256}
    graph = hflow.load(
        ROOT / "algorithms/ppo.yaml", [f"params.{name}={value}" for name, value in given.items()]
    )
    cluster = replace(load_cluster(ROOT / "clusters/local4.yaml"), devices_per_host=count)
    return hflow.compile(graph, cluster, [f"{node}=dp{count}@0-{count - 1}" for node in MODELS])


def executed(pool: MeasuredPool, plan: Plan, folder: Path) -> Cost:
    """Of a step of `execute`, between its two evaluations."""
    execute(plan, folder, pool=pool, export=False, console=Console(quiet=True))
    return cost(pool.marks[1:-1])


def dispatched(pool: MeasuredPool, calls: Sequence[WorkerCall], rounds: int) -> Cost:
    """Of sending `calls` to the workers of the pool's present world, and gathering what they return."""
    for _ in pool.stream([*calls] * (WARM + rounds)):
        pass
    return cost(pool.marks[len(calls) - 1 :: len(calls)])


def cost(marks: Sequence[tuple[float, float]]) -> Cost:
    """Milliseconds between marks, all but the first `WARM`."""
    walls, cpus = zip(*marks[WARM - 1 :])
    wall_s = median(end - start for start, end in pairwise(walls))
    cpu_s = (cpus[-1] - cpus[0]) / (len(cpus) - 1)
    return {"wall": round(wall_s * 1e3, 3), "cpu": round(cpu_s * 1e3, 3)}


def at_far(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The controller's CPU milliseconds per step at `FAR` workers, with the line that says so."""
    counts = [row["workers"] for row in rows]
    lines: dict[str, Cost] = {}
    for way in WAYS:
        cpu = [row[way]["cpu"] for row in rows]
        slope, start = linear_regression(counts, cpu)
        errors = [abs(start + slope * n - y) for n, y in zip(counts, cpu, strict=True)]
        rms = (sum(e * e for e in errors) / len(errors)) ** 0.5
        line = {"cpu": start + slope * FAR, "per_worker": slope, "rms": rms, "worst": max(errors)}
        lines[way] = {name: round(value, 3) for name, value in line.items()}
    return {f"at_{FAR}": lines}


if __name__ == "__main__":
    main()
