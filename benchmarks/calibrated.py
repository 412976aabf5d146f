"""What a calibrated cluster file predicts of runs on this machine, beside what they take.

    python benchmarks/calibrated.py [--cases 0,3] [--steps 8] [--save]

Measures the machine as `hflow calibrate` does; then runs each case twice on its two workers, `--steps` steps
each time: to see how long responses are, and with a plan for these lengths (`lengths: {from: RUN}`). Models
have 4 layers of 256 and random weights, so that answers end after any number of tokens, 17 on average where
32 are allowed. Nothing is fitted: the cluster file is what `calibrate` measured. Each node with a model, and
the step, are compared: medians over all steps but the first. The last line is one JSON object; with --save it
also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from step import machine

import hflow
from hflow.graph.run_config import CheckpointPolicy, RunConfig, SamplePolicy
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_text import cluster_text
from hflow.plan.plan import Plan
from hflow.runtime.run import Run
from hflow.runtime.tools.calibrate import calibrate
from hflow.runtime.tools.new_model import new_model
from hflow.view.measured import compare

ROOT = Path(__file__).resolve().parent
PLAIN = RunConfig(CheckpointPolicy(on_signal=False), export="none", samples=SamplePolicy(every=0))
ALPHABET = "0123456789+-=. "
NODE, STEP = 0.25, 0.15  # how far predictions are to be from what is measured
RL = ("batch=32", "group=4", "max_new_tokens=32", "minibatch=64", "holdout=32")
ONE = ("batch=128", "max_new_tokens=32", "minibatch=64", "holdout=32")
CASES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (  # algorithm, params, pins
    ("grpo", RL, ()),
    ("grpo", RL, ("actor_train=tp2", "rollout=tp2", "ref_logprobs=tp2")),
    ("grpo", RL, ("actor_train=pp2", "rollout=dp2", "ref_logprobs=pp2")),
    ("grpo", RL, ("actor_train=tp1@0", "rollout=tp1@0", "ref_logprobs=tp1@1")),
    ("grpo", (*RL, "max_new_tokens=4"), ()),
    ("grpo", (*RL, "max_new_tokens=96"), ("rollout=dp2", "actor_train=dp2,zero1")),
    ("ppo", ONE, ()),
    ("ppo", ONE, ("actor_train=tp1@0", "rollout=tp1@0", "critic_train=tp1@1", "values=tp1@1")),
    ("remax", (*ONE, "minibatch=128"), ("rollout=dp2", "greedy=dp2", "actor_train=dp2")),
    ("rloo", (*RL, "minibatch=128"), ("actor_train=tp2", "rollout=dp2")),
    ("async_grpo", RL, ("actor_train=tp1@1", "actor_logprobs=tp1@1", "rollout=tp1@0", "ref_logprobs=tp1@0")),
    ("async_grpo", (*RL, "max_new_tokens=96"), ("actor_train=dp2", "rollout=dp2")),
)


@dataclass(frozen=True)
class Times:
    """Seconds per step of a node, or of the step."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def settings(params: tuple[str, ...], folder: Path, algorithm: str, steps: int) -> list[str]:
    found = [f"params.{each}" for each in (*params, f"steps={steps}", f"model={folder / 'lm'}")]
    if algorithm == "ppo":
        found.append(f"params.reward_model={folder / 'scalar'}")
    return found


def measure(case: int, cluster: Path, folder: Path, steps: int) -> list[Times]:
    algorithm, params, pins = CASES[case]
    file = ROOT.parent / "algorithms" / f"{algorithm}.yaml"
    texts = ["prompts", "rollout", *(["greedy"] if algorithm == "remax" else [])]
    looked = folder / f"{case}-look"
    ran(file, settings(params, folder, algorithm, steps), cluster, pins, looked)
    seen = [f"nodes.{node}.lengths={{from: {looked}}}" for node in texts]
    known = [*settings(params, folder, algorithm, steps), *seen]
    plan, run = ran(file, known, cluster, pins, folder / str(case))
    nodes = [Times(c.name, c.predicted_s, c.measured_s) for c in compare(plan, run.metrics)]
    models = {node.name for node in plan.graph.nodes if node.model}
    step_s = median(line["time_s"] for line in run.metrics[1:])
    return [*(n for n in nodes if n.name in models), Times("step", plan.step_time_s, step_s)]


def ran(
    file: Path, overrides: list[str], cluster: Path, pins: tuple[str, ...], folder: Path
) -> tuple[Plan, Run]:
    plan = hflow.compile(hflow.load(file, overrides), cluster, pins)
    return plan, hflow.execute(plan, run_dir=folder, config=PLAIN, export=False)


def show(case: int, times: list[Times]) -> None:
    algorithm, params, pins = CASES[case]
    print(f"{case}: {algorithm} {' '.join(params)}   {' '.join(pins) or 'no pins'}")
    for each in times:
        print(f"   {each.name:16}{each.predicted_s:8.3f} s{each.measured_s:8.3f} s{each.error:+8.0%}")


def report(cluster: Cluster, found: dict[int, list[Times]]) -> dict[str, Any]:
    every = [each for times in found.values() for each in times]
    nodes = [abs(each.error) for each in every if each.name != "step"]
    steps = [abs(each.error) for each in every if each.name == "step"]
    return machine() | {
        "benchmark": "calibrated",
        "cluster": asdict(cluster.device),
        "nodes": len(nodes),
        "nodes_within_25_percent": sum(error <= NODE for error in nodes) / len(nodes),
        "median_node_error": median(nodes),
        "worst_node_error": max(nodes),
        "steps_within_15_percent": sum(error <= STEP for error in steps) / len(steps),
        "median_step_error": median(steps),
        "worst_step_error": max(steps),
        "cases": [
            {
                "algorithm": CASES[n][0],
                "params": CASES[n][1],
                "pins": CASES[n][2],
                "times": list(map(asdict, t)),
            }
            for n, t in found.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted beside measured, on this machine.")
    parser.add_argument("--cases", default=",".join(map(str, range(len(CASES)))), help="which, by number")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save", action="store_true", help="also write results/calibrated-DATE.json")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[int, list[Times]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = calibrate("here", 2, lambda label, value: print(f"{label}: {value}"))
        (folder / "here.yaml").write_text(cluster_text(cluster))
        sizes: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 688}
        for head in ("lm", "scalar"):
            new_model(folder / head, alphabet=ALPHABET, head=head, **sizes)
        for case in map(int, options.cases.split(",")):
            found[case] = measure(case, folder / "here.yaml", folder, options.steps)
            show(case, found[case])
    result = report(cluster, found)
    text = json.dumps(result)
    if options.save:
        (ROOT / "results" / f"calibrated-{result['date']}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
