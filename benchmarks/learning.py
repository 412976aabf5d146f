"""How fast each algorithm learns the two-digit sums of the demo: one warmed model, one budget, several seeds.

    python benchmarks/learning.py [--only grpo,rloo] [--seeds 3] [--jobs 2] [--folder runs/learning]
                                  [--trl-python PATH] [--save]

A random model is warmed up by SFT as in `make demo`, until it can do some of the sums. From there each
algorithm trains on `BUDGET` answers, with the settings of its file; held-out sums are answered greedily
before, after, and nine times in between. Whatever an algorithm samples beside what it trains on is not
counted (DAPO's groups that are all right or all wrong, ReMax's greedy answers). PPO and Safe RLHF have the
rule as their reward, as all others do; Safe RLHF's cost model and the teacher of on-policy distillation, a
model that GRPO trained, are made first. DPO learns from pairs in its file, and is measured at its end. With
an environment that has TRL, its GRPO and RLOO train the same model on the same sums, with the same settings
as far as it has them; of those the end is measured.

Runs that are in the folder already are not repeated, so the whole can be made in parts. The last line is one
JSON object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from shutil import rmtree
from statistics import mean, stdev
from typing import Any

from step import machine

import hflow
from hflow.graph.ir import Graph
from hflow.graph.run_config import CheckpointPolicy, RunConfig, SamplePolicy
from hflow.runtime.engines.python.data import open_source
from hflow.runtime.run import Run
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import new_model
from scripts.check_model import accuracy, held_out

ROOT = Path(__file__).resolve().parent
ALGORITHMS = ROOT.parent / "algorithms"
QUIET = RunConfig(CheckpointPolicy(on_signal=False), samples=SamplePolicy(every=0))
BUDGET = 102_400  # answers that are trained on: 100 steps of GRPO
POINTS = 10  # of a curve, after its first
WARMED, TEACHER, COST = "warmed", "teacher", "cost"  # models in the folder, made before all runs


@dataclass(frozen=True)
class Case:
    """`file`: of the algorithm, or of one beside this script; `models`: parameters that name models."""

    file: Path
    models: tuple[tuple[str, str], ...] = ()


def _own(name: str) -> Path:
    return ROOT / "learning" / f"{name}.yaml"


CASES = {
    name: Case(ALGORITHMS / f"{name}.yaml")
    for name in (
        "grpo", "dr_grpo", "rloo", "remax", "reinforce_pp", "cispo", "gspo", "dapo", "iterative_grpo",
        "async_grpo", "online_dpo", "dpo",
    )
}  # fmt: skip
CASES["on_policy_distillation"] = Case(
    ALGORITHMS / "on_policy_distillation.yaml", (("teacher", f"{TEACHER}/export/actor"),)
)
CASES["ppo"] = Case(_own("rule_ppo"))
CASES["safe_rlhf"] = Case(_own("rule_safe_rlhf"), (("cost_model", f"{COST}/export/cost"),))


PEERS = ("grpo", "rloo")  # of which TRL has trainers that sample; its PPO has no rule as a reward


@dataclass(frozen=True)
class Curve:
    """`accuracy`: of held-out sums, by the number of answers trained on."""

    algorithm: str
    seed: int
    steps: int
    accuracy: dict[int, float]

    @property
    def last(self) -> float:
        return self.accuracy[max(self.accuracy)]


def prepare(folder: Path) -> None:
    """The models that runs begin with, or learn from."""
    if not (folder / "random").exists():
        new_model(folder / "random", alphabet="0123456789+=", layers=3, hidden=128, heads=4, ffn=352)
    made = {
        WARMED: ("sft", folder / "random", []),
        TEACHER: ("grpo", folder / WARMED / "export/actor", ["params.steps=250", "seed=1000"]),
        COST: ("cost_model", folder / WARMED / "export/actor", []),
    }
    for name, (algorithm, model, more) in made.items():
        if not (folder / name / "export").exists():
            graph = hflow.load(ALGORITHMS / f"{algorithm}.yaml", [f"params.model={model}", *more])
            execute(graph, folder / name)


def execute(graph: Graph, folder: Path) -> Run:
    """On one core, in this process; what an earlier attempt has left is overwritten."""
    rmtree(folder, ignore_errors=True)
    plan = hflow.compile(graph, ROOT.parent / "clusters/local1.yaml")
    return hflow.execute(plan, run_dir=folder, config=QUIET, workers="inline")


def curve(algorithm: str, seed: int, folder: Path) -> Curve:
    kept = folder / algorithm / str(seed) / "curve.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        return Curve(**found | {"accuracy": {int(k): v for k, v in found["accuracy"].items()}})
    made = learned(algorithm, seed, folder)
    kept.write_text(json.dumps(asdict(made)))
    return made


def learned(algorithm: str, seed: int, folder: Path) -> Curve:
    case, warmed = CASES[algorithm], folder / WARMED / "export/actor"
    models = [f"params.{name}={folder / path}" for name, path in case.models]
    settings = [f"params.model={warmed}", f"seed={seed}", *models]
    file, run_dir = case.file, folder / algorithm / str(seed)
    params = hflow.load(file, settings).params
    rows = params["batch"] * params.get("group", 2 if algorithm == "dpo" else 1)
    steps = BUDGET // rows
    every = [] if algorithm == "dpo" else [f"eval.every={steps // POINTS}"]
    run = execute(hflow.load(file, [*settings, f"params.steps={steps}", *every]), run_dir)
    by_step = run.evaluations or dict(zip((0, steps), _answered(warmed, run_dir / "export/actor")))
    return Curve(algorithm, seed, steps, {step * rows: value for step, value in by_step.items()})


def peer_accuracy(algorithm: str, seed: int, folder: Path, python: str) -> tuple[str, float]:
    """What TRL's trainer makes of the same model with the same settings, and how much of it is right."""
    to, warmed = folder / "trl" / algorithm / str(seed), folder / WARMED / "export/actor"
    if not (to / "config.json").exists():
        to.mkdir(parents=True, exist_ok=True)
        job = _job(algorithm, seed, warmed, to)
        (to / "job.json").write_text(json.dumps(job))
        script = [python, str(ROOT / "learning/trl_run.py"), str(to / "job.json")]
        subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
    return algorithm, _answered(warmed, to)[-1]


def _job(algorithm: str, seed: int, warmed: Path, to: Path) -> dict[str, Any]:
    graph = hflow.load(ALGORITHMS / f"{algorithm}.yaml", [f"params.model={warmed}"])
    params, data = graph.params, graph.node("prompts")
    tokenizer = load_tokenizer(str(warmed))
    train = open_source(data, {data.options["tokenizer"]: tokenizer}).dataset.train
    texts = tokenizer.decode([list(example.prompt) for example in train])
    prompts = [{"prompt": t, "answer": e.fields["answer"]} for t, e in zip(texts, train, strict=True)]
    (to / "prompts.json").write_text(json.dumps(prompts))
    rows = params["batch"] * params["group"]
    updates = BUDGET // params["minibatch"]
    said = {
        key: params[key] for key in ("lr", "kl_coef", "clip", "minibatch", "max_new_tokens") if key in params
    }
    return said | {
        "algorithm": algorithm, "seed": seed, "rows": rows, "samples": params["group"], "updates": updates,
        "from": str(warmed), "to": str(to), "prompts": str(to / "prompts.json"),
    }  # fmt: skip


def _answered(*folders: Path) -> tuple[float, ...]:
    """The accuracy of exported models, by transformers alone."""
    tokenizer, examples = held_out(
        hflow.load(ALGORITHMS / "grpo.yaml", [f"params.model={folders[0]}"]), str(folders[0])
    )
    return tuple(accuracy(str(folder), tokenizer, examples, 4) for folder in folders)


def _alone(cores: SimpleQueue[int]) -> None:
    """What a process begins with: a core of its own, on which no other one waits, and no lines of steps."""
    os.sched_setaffinity(0, {cores.get()})
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def summary(curves: Sequence[Curve], peers: Sequence[float]) -> dict[str, Any]:
    """Of one algorithm."""
    lasts = [each.last for each in curves]
    return {
        **({"others": {"TRL": list(peers)}} if peers else {}),
        "steps": curves[0].steps,
        "final": lasts,
        "mean": mean(lasts),
        "spread": stdev(lasts) if len(lasts) > 1 else None,
        "curve": {n: [each.accuracy[n] for each in curves] for n in sorted(curves[0].accuracy)},
    }


def report(curves: Sequence[Curve], peers: Sequence[tuple[str, float]]) -> dict[str, Any]:
    by = {name: [each for each in curves if each.algorithm == name] for name in CASES}
    others = {name: [right for algorithm, right in peers if algorithm == name] for name in CASES}
    made = {
        name: summary(sorted(found, key=lambda each: each.seed), others[name])
        for name, found in by.items()
        if found
    }
    return machine() | {"benchmark": "learning", "answers": BUDGET, "algorithms": made}


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning curves of all algorithms on two-digit sums.")
    parser.add_argument("--only", default=",".join(CASES), help="algorithms, by name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once, a core each"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument(
        "--trl-python", metavar="PATH", help="of an environment with TRL 1.16, to compare with"
    )
    parser.add_argument("--save", action="store_true", help="also write results/learning-DATE.json")
    options = parser.parse_args()
    folder, spawn = options.folder.resolve(), get_context("spawn")
    if unknown := set(options.only.split(",")) - set(CASES):
        parser.error(f"no such algorithm: {', '.join(sorted(unknown))}")
    wanted = [(name, seed) for seed in range(options.seeds) for name in options.only.split(",")]
    cores: SimpleQueue[int] = spawn.SimpleQueue()
    own = sorted(os.sched_getaffinity(0))[: options.jobs]
    for core in own:
        cores.put(core)
    with ProcessPoolExecutor(len(own), spawn, _alone, (cores,)) as pool:
        pool.submit(prepare, folder).result()
        waiting = [pool.submit(curve, name, seed, folder) for name, seed in wanted]
        curves: list[Curve] = []
        for done in as_completed(waiting):
            made = done.result()
            curves.append(made)
            print(f"{made.algorithm:24}seed {made.seed}  {made.steps:4} steps  {made.last:.1%}", flush=True)
        peers = [
            pool.submit(peer_accuracy, *job, folder, options.trl_python)
            for job in wanted
            if options.trl_python and job[0] in PEERS
        ]
        others = [done.result() for done in as_completed(peers)]
    made = report(curves, others)
    if options.save:
        target = ROOT / "results" / f"learning-{made['date']}.json"
        target.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made))


if __name__ == "__main__":
    main()
