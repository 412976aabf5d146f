"""How long `hflow compile` takes, and how good the proof is that its plan is the best.

    python benchmarks/compile.py [--algorithms ppo,grpo] [--models 7b,13b] [--gpus 8,16] [--large] [--save]

Four algorithms at the paper's size (arXiv:2409.19256, section 8.1: prompts and responses of 1,024 tokens, all
models Llamas of one size in bf16, A100-80GB in hosts of 8): the median of some compilations in one process,
of loaded graphs and with empty caches, and of whole processes for a few; with --large also on 1,024 and
4,096 GPUs, once each. `gap` is the part by which the plan may be worse than the best one, `plans` those
priced. Where nothing fits, the time is that of saying so. The last line is one JSON object; with --save
it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import hflow
from hflow.compiler.cluster import Cluster
from hflow.compiler.cluster_file import load_cluster
from hflow.compiler.compile import compile_graph
from hflow.compiler.plan import Plan
from hflow.compiler.planner.options import PlannerOptions
from hflow.diagnostics import HflowError
from hflow.graph.graph import Graph

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("ppo", "grpo", "remax", "safe_rlhf")
MODELS = ("7b", "13b", "34b", "70b")
GPUS = (8, 16, 32, 64, 96, 128)
LARGE = (1024, 4096)
WHOLE = (("ppo", "7b", 16), ("ppo", "70b", 128), ("safe_rlhf", "34b", 64))
TOKENS, ROWS, MINIBATCH = 1024, 1024, 128
SAMPLES = {"grpo": 8}  # of one prompt
PATHS = {"ppo": ("reward_model",), "safe_rlhf": ("reward_model", "cost_model")}  # besides `model`


@dataclass(frozen=True)
class Measured:
    """Seconds to compile; `gap`, `explored` and `step_s` are None where nothing fits. `process_s`: of a whole
    `hflow compile`, where it was measured."""

    algorithm: str
    model: str
    gpus: int
    seconds: float
    gap: float | None
    explored: int | None
    step_s: float | None
    process_s: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to compile, gap and plans priced.")
    parser.add_argument(
        "--algorithms", default=",".join(ALGORITHMS), help="which of ppo,grpo,remax,safe_rlhf"
    )
    parser.add_argument("--models", default=",".join(MODELS), help="which of 7b,13b,34b,70b")
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)), help="numbers of GPUs")
    parser.add_argument("--times", type=int, default=3, help="compilations of which the median counts")
    parser.add_argument("--budget", type=float, help="seconds for one search, if not the fixed effort")
    parser.add_argument("--large", action="store_true", help="also 1,024 and 4,096 GPUs")
    parser.add_argument("--save", action="store_true", help="also write results/compile-DATE.json")
    options = parser.parse_args()
    algorithms, models = options.algorithms.split(","), options.models.split(",")
    gpus = [int(n) for n in options.gpus.split(",")]
    wanted = [(a, m, n, options.times) for a in algorithms for m in models for n in gpus]
    if options.large:
        wanted += [(a, models[0], n, 1) for n in LARGE for a in algorithms]
    print(
        f"{'algorithm':<10}{'model':>6}{'gpus':>6}{'compile s':>11}{'process s':>11}{'gap %':>8}{'plans':>8}"
    )
    found = [shown(measured(*case, options.budget)) for case in wanted]
    line = json.dumps(report(found))
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"benchmarks/results/compile-{date}.json").write_text(line + "\n")
    print(line)


def measured(algorithm: str, model: str, gpus: int, times: int, budget_s: float | None) -> Measured:
    graph, cluster = sized(algorithm, model), testbed(gpus)
    seconds, plan = timed(lambda: compiled(graph, cluster, budget_s), times)
    process_s = None
    if (algorithm, model, gpus) in WHOLE:
        process_s = round(timed(lambda: run(algorithm, model, gpus, budget_s), times)[0], 3)
    if plan is None:
        return Measured(algorithm, model, gpus, round(seconds, 3), None, None, None, process_s)
    found = plan.search.gap, plan.search.explored, plan.step_time_s
    return Measured(algorithm, model, gpus, round(seconds, 3), *found, process_s)


def shown(found: Measured) -> Measured:
    """Print a line of the table."""
    process = f"{found.process_s:.2f}" if found.process_s else ""
    gap = "no fit" if found.gap is None else f"{100 * found.gap:.2f}"
    plans = "" if found.explored is None else str(found.explored)
    told = f"{found.seconds:>11.2f}{process:>11}{gap:>8}{plans:>8}"
    print(f"{found.algorithm:<10}{found.model:>6}{found.gpus:>6}{told}", flush=True)
    return found


def report(found: Sequence[Measured]) -> dict[str, object]:
    usual = [m for m in found if m.gpus <= max(GPUS)]
    return {
        "benchmark": "compile",
        "cores": len(os.sched_getaffinity(0)),
        "median_s": median(m.seconds for m in usual) if usual else None,
        "slowest_s": max((m.seconds for m in usual), default=None),
        "greatest_gap": max((m.gap for m in usual if m.gap is not None), default=None),
        "slow": [f"{m.algorithm} {m.model} {m.gpus}" for m in usual if m.seconds > 2],
        "cases": [asdict(m) for m in found],
    }


def timed(action: Callable[[], Plan | None], times: int) -> tuple[float, Plan | None]:
    """The median of the seconds that it takes when nothing is known from before, and the last result."""
    seconds: list[float] = []
    result = None
    for _ in range(times):
        forget()
        started = time.perf_counter()
        result = action()
        seconds.append(time.perf_counter() - started)
    return median(seconds), result


def forget() -> None:
    """Empty the compiler's caches."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hflow."):
            for value in vars(module).values():
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    clear()


def compiled(graph: Graph, cluster: Cluster, budget_s: float | None) -> Plan | None:
    """None where nothing fits."""
    try:
        return compile_graph(graph, cluster, (), PlannerOptions(budget_s=budget_s))
    except HflowError as error:
        if {d.code for d in error.diagnostics} <= {"HF304", "HF305"}:
            return None
        raise


def run(algorithm: str, model: str, gpus: int, budget_s: float | None) -> None:
    """One `hflow compile`, from the start of the process to its end."""
    overrides = [word for text in sizes(algorithm, model) for word in ("--set", text)]
    file = f"algorithms/{algorithm}.yaml"
    hflow_compile = [sys.executable, "-m", "hflow.cli", "compile", file]
    options = ["--cluster", f"a100x{gpus}", *(["--budget", str(budget_s)] if budget_s is not None else [])]
    subprocess.run([*hflow_compile, *options, *overrides], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def testbed(gpus: int) -> Cluster:
    cluster = load_cluster(ROOT / "clusters/a100x8.yaml")
    return replace(cluster, name=f"a100x{gpus}", hosts=gpus // cluster.devices_per_host)


def sized(algorithm: str, model: str) -> Graph:
    return hflow.load(ROOT / f"algorithms/{algorithm}.yaml", sizes(algorithm, model))


def sizes(algorithm: str, model: str) -> list[str]:
    """The overrides that give a graph the paper's size."""
    prompts = ROWS // SAMPLES.get(algorithm, 1)
    params: dict[str, object] = {
        "batch": prompts,
        "minibatch": MINIBATCH,
        "max_new_tokens": TOKENS,
        "holdout": ROWS,
        **dict.fromkeys(("model", *PATHS.get(algorithm, ())), f"shape:llama-{model}"),
    }
    names = [m.name for m in hflow.load(ROOT / f"algorithms/{algorithm}.yaml").models]
    data = ["nodes.prompts.with.max_prompt_tokens"]
    if algorithm == "safe_rlhf":
        data += [f"nodes.texts.with.max_{what}_tokens" for what in ("prompt", "response")]
    return [
        *(f"params.{name}={value}" for name, value in params.items()),
        *(f"models.{name}.dtype=bf16" for name in names),
        *(f"{key}={TOKENS}" for key in data),
    ]


if __name__ == "__main__":
    main()
