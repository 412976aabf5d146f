"""Tokens per second of the demo's GRPO step, split by node, beside the machine's own GEMM rate.

    python benchmarks/step.py [--steps 12] [--save]

Runs `algorithms/grpo.yaml` on the local cluster from random weights (all responses have the greatest
length; no reward is ever earned, which costs the same time) and takes medians over steps, the first
two left out. The bound is the time that the step's matrix products would take at the rate that as
many processes of torch.matmul reach on this machine at once, measured right before and after. The
last line is one JSON object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hflow
from hflow.plan.flops import forward_flops
from hflow.plan.plan import Plan
from hflow.plan.workload import workload
from hflow.runtime.tools.new_model import new_model

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 2


def gemm_flops(seconds: float) -> float:
    """FLOP/s of fp32 matrix products of the model's shapes, [4096, 128] x [128, 352], on one thread."""
    torch.set_num_threads(1)
    a, b = torch.randn(4096, 128), torch.randn(128, 352)
    out = a @ b
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        torch.matmul(a, b, out=out)
        count += 1
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] * count / (time.perf_counter() - started)


def machine_flops(processes: int, seconds: float = 2.0) -> float:
    """The sum over `processes` processes that multiply at the same time."""
    with ProcessPoolExecutor(processes) as pool:
        return sum(pool.map(gemm_flops, [seconds] * processes))


def step_flops(plan: Plan) -> float:
    """FLOP of a step's matrix products: forward passes count once, training three times. The shared prompt
    of a group is read once."""
    total = 0.0
    for node in (n for n in plan.graph.nodes if n.model):
        assert node.model
        shape, work = plan.shapes[node.model.model], workload(node)
        if node.op == "generate":
            total += forward_flops(shape, work.rows // work.samples * work.prompt, work.prompt / 2)
            total += forward_flops(shape, work.rows * work.response, work.sequence)
        else:
            passes = 3 * node.repeat.epochs if node.repeat else 1
            total += passes * forward_flops(shape, work.rows * work.sequence, work.sequence / 2)
    return total


def measure(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        new_model(model, ffn=352, alphabet="0123456789+=")  # the demo's
        overrides = [f"params.model={model}", f"params.steps={steps}", "params.holdout=2"]
        graph = hflow.load(ROOT / "algorithms/grpo.yaml", overrides)
        plan = hflow.compile(graph, ROOT / "clusters/local.yaml")
        before = machine_flops(len(plan.devices))
        run = hflow.execute(plan, run_dir=Path(folder) / "run", export=False)
        rate = (before + machine_flops(len(plan.devices))) / 2
    kept = run.metrics[WARMUP:]
    step_s, tokens = median(m["time_s"] for m in kept), median(m["tokens"] for m in kept)
    nodes = {n.node: _share(median(m[f"time_s.{n.node}"] for m in kept), step_s, tokens) for n in plan.nodes}
    bound_s = step_flops(plan) / rate
    return {
        "benchmark": "step",
        "tokens_per_s": tokens / step_s,
        "step_s": step_s,
        "tokens": tokens,
        "nodes": nodes,
        "bound": {"what": "matrix products at torch.matmul's rate", "flops_per_s": rate, "s": bound_s},
        "fraction_of_bound": bound_s / step_s,
        "steps": len(kept),
        "plan": plan.hash,
        **machine(),
    }


def _share(node_s: float, step_s: float, tokens: float) -> dict[str, float]:
    return {"s": node_s, "share": node_s / step_s, "tokens_per_s": tokens / node_s}


def machine() -> dict[str, Any]:
    """Where and when: enough to compare figures."""
    return {
        "machine": f"{platform.machine()} with {_instructions()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _instructions() -> str:
    """The widest vectors that torch uses, and the matrix unit for bf16: twice the speed, and ten times."""
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{vectors} and AMX" if torch.cpu._is_amx_tile_supported() else vectors


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of a GRPO step.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/step-DATE.json")
    options = parser.parse_args()
    if options.steps <= WARMUP:
        parser.error(f"--steps must be more than {WARMUP}")
    result = measure(options.steps)
    line = json.dumps(result)
    if options.save:
        (ROOT / f"benchmarks/results/step-{result['date']}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
