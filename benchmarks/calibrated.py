"""What a calibrated cluster file predicts of runs on this machine, beside what they take.

    python benchmarks/calibrated.py [--cases 0,3] [--steps 8] [--save]

Runs each case twice on the machine's two workers, `--steps` steps each time: to see how long responses are,
and with a plan for these lengths (`lengths: {from: RUN}`). Between the two the machine is measured as
`hflow calibrate` does, since the speed of a shared machine changes within minutes. Models have 4 layers of
256 and random weights, so that answers end after any number of tokens, 17 on average where 32 are allowed. An
answer's reward is whether it ends in certain digits, so that weights are updated; the learning rate is so
small that lengths stay as they are. Nothing is fitted: the cluster file is what `calibrate` measured. Each
node with a model, and the step, are compared: medians over all steps but the first. The last line is one JSON
object; with --save it also goes to benchmarks/results/.
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
from hflow import units
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
SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 688}
REWARD = ("fn=hflow.ops.rewards.format_match", "in={text: %s.text}", "with={pattern: '.*[0-7]'}")
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
    found = [f"params.{each}" for each in (*params, f"steps={steps}", "lr=1e-8", f"model={folder / 'lm'}")]
    if algorithm == "ppo":
        return [*found, f"params.reward_model={folder / 'scalar'}"]
    found += [f"nodes.reward.{each}".replace("%s", "rollout") for each in REWARD]
    if algorithm == "remax":
        found += [f"nodes.greedy_reward.{each}".replace("%s", "greedy") for each in REWARD]
    return found


def measure(case: int, folder: Path, steps: int) -> tuple[Cluster, list[Times]]:
    algorithm, params, pins = CASES[case]
    file = ROOT.parent / "algorithms" / f"{algorithm}.yaml"
    texts = ["prompts", "rollout", *(["greedy"] if algorithm == "remax" else [])]
    looked = folder / f"{case}-look"
    ran(file, settings(params, folder, algorithm, steps), "local", pins, looked)
    seen = [f"nodes.{node}.lengths={{from: {looked}}}" for node in texts]
    known = [*settings(params, folder, algorithm, steps), *seen]
    cluster, cluster_file = calibrate("here", 2), folder / f"{case}.yaml"
    cluster_file.write_text(cluster_text(cluster))
    plan, run = ran(file, known, cluster_file, pins, folder / str(case))
    nodes = [Times(c.name, c.predicted_s, c.measured_s) for c in compare(plan, run.metrics)]
    models = {node.name for node in plan.graph.nodes if node.model}
    step_s = median(line["time_s"] for line in run.metrics[1:])
    return cluster, [*(n for n in nodes if n.name in models), Times("step", plan.step_time_s, step_s)]


def ran(
    file: Path, overrides: list[str], cluster: Path | str, pins: tuple[str, ...], folder: Path
) -> tuple[Plan, Run]:
    plan = hflow.compile(hflow.load(file, overrides), cluster, pins)
    return plan, hflow.execute(plan, run_dir=folder, config=PLAIN, export=False)


def show(case: int, cluster: Cluster, times: list[Times]) -> None:
    algorithm, params, pins = CASES[case]
    print(f"{case}: {algorithm} {' '.join(params)}   {' '.join(pins) or 'no pins'}")
    print(f"   {units.count(cluster.device.flops)}FLOP/s")
    for each in times:
        print(f"   {each.name:16}{each.predicted_s:8.3f} s{each.measured_s:8.3f} s{each.error:+8.0%}")


def report(found: dict[int, tuple[Cluster, list[Times]]]) -> dict[str, Any]:
    every = [each for _, times in found.values() for each in times]
    nodes = [abs(each.error) for each in every if each.name != "step"]
    steps = [abs(each.error) for each in every if each.name == "step"]
    return machine() | {
        "benchmark": "calibrated",
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
                "device": asdict(cluster.device),
                "times": list(map(asdict, times)),
            }
            for n, (cluster, times) in found.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted beside measured, on this machine.")
    parser.add_argument("--cases", default=",".join(map(str, range(len(CASES)))), help="which, by number")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save", action="store_true", help="also write results/calibrated-DATE.json")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[int, tuple[Cluster, list[Times]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for head in ("lm", "scalar"):
            new_model(folder / head, alphabet=ALPHABET, head=head, **SIZES)
        for case in map(int, options.cases.split(",")):
            found[case] = measure(case, folder, options.steps)
            show(case, *found[case])
    result = report(found)
    text = json.dumps(result)
    if options.save:
        (ROOT / "results" / f"calibrated-{result['date']}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
