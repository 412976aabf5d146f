"""A run whose responses grow, with `run: {replan: true}` and without: how long it takes, switching included.

    python benchmarks/replan.py [--rounds 5] [--steps 40] [--save]

GRPO of 8 prompts with 4 answers each on the two workers of clusters/local.yaml, updates of 16 rows, a Qwen2
of 4 layers of 256. Answers have 2 tokens in the first 10 steps and 100 after them (benchmarks/replanning).
Both runs begin with the plan that is best for these 10 steps. A third run, all of whose answers are short,
may plan again as well. `with_s`, `without_s`: medians over rounds of the seconds of all steps but the first,
which warms up, and of switching; contestants take turns. `switch_s`: what switching took of these.
`tokens_equal`: in every round, all steps sampled the same tokens with and without.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from replanning.growing import growing_model, growing_rows
from step import machine

import hflow
from hflow.graph.ir import Graph
from hflow.graph.run_config import CheckpointPolicy, ReplanPolicy, RunConfig, SamplePolicy
from hflow.runtime.run import Run

ROOT = Path(__file__).resolve().parent
BATCH, SHORT, MOST = 8, 10, 200
PLAIN = RunConfig(CheckpointPolicy(on_signal=False), export="none", samples=SamplePolicy(every=0))
REPLANS = RunConfig(PLAIN.checkpoint, "none", samples=PLAIN.samples, replan=ReplanPolicy(every=10))


def graph_of(folder: Path, steps: int, short: int) -> Graph:
    """Of `steps` steps, the first of which have `short` answers."""
    rows = growing_rows(folder / f"rows-{short}.jsonl", BATCH * short, BATCH * (steps - short))
    said = {"model": folder / "model", "rows": rows, "steps": steps, "batch": BATCH, "most": MOST}
    said["minibatch"] = 16
    file = ROOT / "replanning" / "growing.yaml"
    return hflow.load(file, [f"params.{key}={value}" for key, value in said.items()])


def seconds(run: Run) -> float:
    """Of all steps but the first, and of what is between them: there are no evaluations, only switches."""
    return sum(line["time_s"] for line in run.metrics[1:]) + sum(switches(run))


def switches(run: Run) -> list[float]:
    """What each took. Planning goes on beside steps, and is in their time."""
    events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    return [event["switch_s"] for event in events if event["event"] == "replanned"]


def measure(folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    growing_model(folder / "model", hidden=256, ffn=512, mean_long=100.0)
    growing, staying = graph_of(folder, steps, SHORT), graph_of(folder, steps, steps)
    plans = {"without": growing, "with": growing, "staying": staying}
    configs = {"without": PLAIN, "with": REPLANS, "staying": REPLANS}
    made = {
        name: hflow.compile(graph, ROOT.parent / "clusters" / "local.yaml") for name, graph in plans.items()
    }
    runs: dict[str, list[Run]] = {name: [] for name in plans}
    for number in range(rounds):
        for name, plan in made.items():
            run = hflow.execute(plan, run_dir=folder / f"{name}-{number}", config=configs[name], export=False)
            runs[name].append(run)
            print(f"{name:8} round {number + 1}: {seconds(run):.1f} s, switching {switches(run)}", flush=True)
    tokens = [
        [[line["digest.rollout"] for line in run.metrics] for run in runs[n]] for n in ("without", "with")
    ]
    times = {name: [seconds(run) for run in runs[name]] for name in runs}
    return {
        "steps": steps,
        "rounds": rounds,
        "without_s": median(times["without"]),
        "with_s": median(times["with"]),
        "all_s": times,
        "switch_s": [switches(run) for run in runs["with"]],
        "switches_where_lengths_stay": sum(len(switches(run)) for run in runs["staying"]),
        "tokens_equal": tokens[0] == tokens[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A run whose responses grow, with and without `replan`.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/replan-DATE.json")
    options = parser.parse_args()
    if options.steps <= SHORT:
        parser.error(f"--steps must be more than {SHORT}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = machine() | measure(Path(folder), options.rounds, options.steps)
    text = json.dumps(found)
    if options.save:
        (ROOT / "results" / f"replan-{found['date']}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
