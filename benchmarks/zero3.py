"""Whether ZeRO-3 would win anything: the best plan beside the best that splits the actor's weights over dp.

    python benchmarks/zero3.py [--save]

GRPO and PPO with prompts and responses of 1,024 tokens, 64 rows, bf16, on 2 to 8 GPUs of one host. No engine
of hflow runs ZeRO-3 (arXiv:1910.02054); its price is the cost model's, which the published planners use.
`ratio` is the predicted step with ZeRO-3 by that without it: below 1 where it would be faster. Cases in which
neither fits into memory are left out and counted. The last line is one JSON object; with --save it also goes
to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

from step import machine

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster

ROOT = Path(__file__).resolve().parent
ALGORITHMS, MODELS = ("grpo", "ppo"), ("qwen2.5-1.5b", "llama-7b", "llama-13b", "llama-34b")
HOSTS = (("h100x8", 2), ("h100x8", 4), ("h100x8", 8), ("a100x8", 4), ("a100x8", 8))
SIZES = ("params.batch=64", "params.max_new_tokens=1024", "nodes.prompts.with.max_prompt_tokens=1024")


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted steps with and without ZeRO-3.")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/zero3-DATE.json")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    unfit = 0
    for algorithm, model, (host, gpus) in product(ALGORITHMS, MODELS, HOSTS):
        graph, whole = loaded(algorithm, model), load_cluster(host)
        cluster = replace(whole, devices_per_host=gpus)
        without, with_it = step_s(graph, cluster), step_s(graph, cluster, "actor_train=zero3")
        assert (without is None) == (with_it is None), (
            "ZeRO-3 makes room for no model that has none without it"
        )
        if without is None or with_it is None:
            unfit += 1
            continue
        name = f"{algorithm} {model} {gpus} {whole.device.name}"
        found[name] = {"step_s": without, "zero3_s": with_it, "ratio": round(with_it / without, 4)}
        print(f"{name:36} {found[name]}", flush=True)
    ratios = [case["ratio"] for case in found.values()]
    report = {
        "benchmark": "zero3", **machine(), "least": min(ratios), "median": median(ratios),
        "faster": sum(r < 1 for r in ratios), "of": len(ratios), "unfit": unfit, "cases": found,
    }  # fmt: skip
    line = json.dumps(report)
    if options.save:
        (ROOT / f"results/zero3-{report['date']}.json").write_text(line + "\n")
    print(line)


def loaded(algorithm: str, model: str) -> Graph:
    """All models of one size, in bf16."""
    rewarded = (f"params.reward_model=shape:{model}",) if algorithm == "ppo" else ()
    overrides = [*SIZES, f"params.model=shape:{model}", *rewarded]
    names = [m.name for m in hflow.load(algorithm, overrides).models]
    return hflow.load(algorithm, [*overrides, *(f"models.{name}.dtype=bf16" for name in names)])


def step_s(graph: Graph, cluster: Cluster, *pins: str) -> float | None:
    """Predicted seconds per step; None where no plan fits."""
    try:
        return round(hflow.compile(graph, cluster, pins).step_time_s, 3)
    except HflowError as error:
        if {d.code for d in error.diagnostics} <= {"HF302", "HF305"}:
            return None
        raise


if __name__ == "__main__":
    main()
