"""What weights in flight bring: seconds per step, and how old the tokens are that it learns from.

    python benchmarks/freshness.py [--steps 9] [--save]

One GRPO graph (freshness/grpo.yaml), a Qwen2 of 4 layers of 256 in float32, 64 answers of 96 tokens a step.
SGLang samples on one core, Megatron-core scores and trains on the other. `waiting`: every step samples with
the newest weights, and nothing overlaps. `one behind`: with `lag: 1` step k + 1 is sampled while step k
trains. `in flight`: the same, and the new weights serve the rest of the answers as soon as they are there.

Seconds are the median over the steps after the second. `age`: mean over tokens, in updates, from the
versions that the server tells. `apart`: mean |difference| of the log-probs of the sampler and of the actor
that learns, nats. `ratio`: steps per second over those of `waiting`. One run after another. Needs
`make setup-sglang`. The last line is one JSON object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from step import machine

import hflow
from hflow.runtime.execute import execute
from hflow.runtime.tools.new_model import new_model

ROOT = Path(__file__).resolve().parent
WARMUP = 2
WAYS = {"waiting": (0, False), "one behind": (1, False), "in flight": (1, True)}
PINS = "rollout=tp1@1", "actor_train=tp1@0", "actor_logprobs=tp1@0", "ref_logprobs=tp1@0"


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps per second, and the age of tokens, in three ways.")
    parser.add_argument("--steps", type=int, default=9, help=f"the first {WARMUP} do not count")
    parser.add_argument("--save", action="store_true", help="also write results/freshness-DATE.json")
    options = parser.parse_args()
    ways: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        for way in WAYS:
            ways[way] = measure(way, Path(folder), options.steps)
            ways[way]["ratio"] = ways["waiting"]["s"] / ways[way]["s"]
            print(f"{way:<12}", *(f"{name} {value:.3g}" for name, value in ways[way].items()), flush=True)
    report = {"benchmark": "freshness", "ways": ways, "steps": options.steps, **machine()}
    line = json.dumps(report)
    if options.save:
        (ROOT / f"results/freshness-{report['date']}.json").write_text(line + "\n")
    print(line)


def write_model(folder: Path) -> None:
    new_model(
        folder, family="qwen2", layers=4, hidden=256, heads=4, kv_heads=4, ffn=704,
        alphabet="0123456789+-=. ", max_positions=128, tied=True, seed=0, force=False,
    )  # fmt: skip


def measure(way: str, folder: Path, steps: int) -> dict[str, float]:
    lag, in_flight = WAYS[way]
    params = {"model": folder / "model", "steps": steps, "lag": lag, "in_flight": str(in_flight).lower()}
    overrides = [f"params.{name}={value}" for name, value in params.items()]
    graph = hflow.load(ROOT / "freshness/grpo.yaml", overrides)
    plan = hflow.compile(graph, "local", PINS, engines=("rollout=sglang",))
    run = execute(plan, folder / way.replace(" ", "_"), export=False)
    later: list[dict[str, Any]] = list(run.metrics[WARMUP:])
    return {
        "s": median(line["time_s"] for line in later),
        "age": mean(lag - line.get("rollout.renewed_tokens", 0.0) for line in later),
        "apart": mean(line["apart.difference"] for line in later),
    }


if __name__ == "__main__":
    main()
