"""How long `hflow compile` takes, and how good the proof is that its plan is the best.

    python benchmarks/compile.py [--algorithms ppo,grpo] [--models 7b,13b] [--gpus 8,16] [--large] [--save]

Four algorithms at the paper's size (arXiv:2409.19256, section 8.1: prompts and responses of 1,024 tokens, all
models Llamas of one size in bf16, A100-80GB in hosts of 8): the median of some compilations in one process,
of loaded graphs and with empty caches, and of whole processes for a few; with --large also on 1,024 and
4,096 GPUs, once each. All cases are gone through once, then again: on a machine whose speed changes from
minute to minute, the times of one case are then of as many minutes. `gap` is the part by which the plan may
be worse than the best of those searched, `plans` those priced. Where nothing fits, the time is that of saying
so. The last line is one JSON object; with --save it also goes to benchmarks/results/.
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
from typing import TypeVar

import hflow
from hflow.compiler.compile import compile_graph
from hflow.compiler.options import PlannerOptions
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("ppo", "grpo", "remax", "safe_rlhf")
MODELS = ("7b", "13b", "34b", "70b")
GPUS = (8, 16, 32, 64, 96, 128)
LARGE = (1024, 4096)
WHOLE = (("ppo", "7b", 16), ("ppo", "70b", 128), ("safe_rlhf", "34b", 64))
TOKENS, ROWS, MINIBATCH = 1024, 1024, 128
SAMPLES = {"grpo": 8}  # of one prompt
PATHS = {"ppo": ("reward_model",), "safe_rlhf": ("reward_model", "cost_model")}  # besides `model`

T = TypeVar("T")
Case = tuple[str, str, int]  # algorithm, model, GPUs


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
    wanted = [(a, m, n) for a in algorithms for m in models for n in gpus]
    large = [(a, models[0], n) for n in LARGE for a in algorithms] if options.large else []
    found = [*together(wanted, options.times, options.budget), *together(large, 1, options.budget)]
    print(
        f"{'algorithm':<10}{'model':>6}{'gpus':>6}{'compile s':>11}{'process s':>11}{'gap %':>8}{'plans':>8}"
    )
    for each in found:
        show(each)
    line = json.dumps(report(found))
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"benchmarks/results/compile-{date}.json").write_text(line + "\n")
    print(line)


def together(cases: Sequence[Case], times: int, budget_s: float | None) -> list[Measured]:
    """Each of some cases so many times, in turn: the medians."""
    rounds: list[list[Measured]] = []
    for number in range(times if cases else 0):
        print(f"round {number + 1} of {times}: {len(cases)} cases", flush=True)
        rounds.append([measured(*case, budget_s) for case in cases])
    return [middle(of_case) for of_case in zip(*rounds)]


def measured(algorithm: str, model: str, gpus: int, budget_s: float | None) -> Measured:
    """Once, when nothing is known from before."""
    graph, cluster = sized(algorithm, model), testbed(gpus)
    forget()
    seconds, plan = timed(lambda: compiled(graph, cluster, budget_s))
    process_s = None
    if (algorithm, model, gpus) in WHOLE:
        process_s, _ = timed(lambda: run(algorithm, model, gpus, budget_s))
    if plan is None:
        return Measured(algorithm, model, gpus, seconds, None, None, None, process_s)
    found = plan.search.searched_gap, plan.search.explored, plan.step_time_s
    return Measured(algorithm, model, gpus, seconds, *found, process_s)


def middle(found: Sequence[Measured]) -> Measured:
    """The medians of what was measured of one case."""
    whole = [each.process_s for each in found if each.process_s is not None]
    seconds = round(median(each.seconds for each in found), 3)
    return replace(found[0], seconds=seconds, process_s=round(median(whole), 3) if whole else None)


def show(found: Measured) -> None:
    """Print a line of the table."""
    process = f"{found.process_s:.2f}" if found.process_s else ""
    gap = "no fit" if found.gap is None else f"{100 * found.gap:.2f}"
    plans = "" if found.explored is None else str(found.explored)
    told = f"{found.seconds:>11.2f}{process:>11}{gap:>8}{plans:>8}"
    print(f"{found.algorithm:<10}{found.model:>6}{found.gpus:>6}{told}")


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


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """The seconds that it takes, and the result."""
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


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
    hflow_compile = [sys.executable, "-m", "hflow.cli.app", "compile", file]
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
