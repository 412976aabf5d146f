"""PPO as HybridFlow measured it (arXiv:2409.19256, section 8): predicted and published tokens per second.

    python benchmarks/paper.py [--models 7B,13B] [--gpus 8,16,32] [--save]

The paper's testbed and workload: A100-80GB in hosts of 8, prompts and responses of 1,024 tokens, 1,024 rows,
one epoch of 8 updates, four Llamas of one size in bf16. Each system is a way to plan the same graph on the
same cost model; nothing is fitted to the published figures. All but hflow score what was sampled once more:

- hflow: what `hflow compile` finds; HybridFlow: its Algorithms 1 and 2, with an engine that wakes up, and
  whose host takes time of each token step (vLLM 0.3.1);
- DeepSpeed-Chat: all models on all GPUs, ZeRO-3, generation with tensor parallelism inside hosts;
- OpenRLHF: each model on GPUs of its own, ZeRO-3, generation by such a vLLM on yet others;
- NeMo-Aligner: actor and reference on one half, critic and reward on the other, generation in the layout of
  training and without a KV cache.

Published figures (figure 9, read from pixels) exist up to 32 GPUs; hflow is set beside HybridFlow's. A
prediction is what a system's plan allows on the engines that are modelled. Where a published figure is far
lower, the system loses the rest elsewhere, and the output says so. The last line is one JSON object; with
--save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import hflow
from hflow.compiler.compile import compile_graph
from hflow.compiler.options import Planner, PlannerOptions
from hflow.cost.activation_memory import kv_cache_bytes
from hflow.cost.comm import host_transfer_s
from hflow.cost.resident_memory import resident_bytes
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.flops import forward_flops
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
PROMPT, RESPONSE, ROWS, UPDATES = 1024, 1024, 1024, 8
UPDATE_ROWS = ROWS // UPDATES
SMALLEST = {"7B": 8, "13B": 16, "34B": 32, "70B": 64}  # the paper's
GPUS = (8, 16, 32, 64, 96, 128)
PLANNERS: Mapping[str, Planner] = {
    "hflow": "exact",
    "hybridflow": "hybridflow",
    "dschat": "deepspeed-chat",
    "openrlhf": "openrlhf",
    "nemo": "nemo-aligner",
}
# Of vLLM in 2024, while its GPU is idle: 5 to 13 ms (https://github.com/vllm-project/vllm/issues/6854).
VLLM_STEP_S = 9e-3
ON_VLLM: Sequence[Planner] = ("hybridflow", "openrlhf")
SCORED_SAMPLES = ROOT / "benchmarks/data/scored_samples.yaml"
FURTHER_MODELS = {"ppo": ("reward_model",), "safe_rlhf": ("reward_model", "cost_model")}  # params
PROMPTS = (("prompts", "prompt"),)  # data nodes, and which of their texts have a greatest length
TEXTS = {"safe_rlhf": (*PROMPTS, ("texts", "prompt"), ("texts", "response"))}
NOTHING_FITS = ("HF304", "HF305")
Figures = Mapping[tuple[str, int, str], float]


@dataclass(frozen=True)
class Prediction:
    """Tokens per second; `predicted` is None where nothing fits, `published` where there is no figure."""

    model: str
    gpus: int
    system: str
    predicted: float | None
    published: float | None

    @property
    def error(self) -> float | None:
        if self.predicted is None or self.published is None:
            return None
        return self.predicted / self.published - 1


def main() -> None:
    parser = argparse.ArgumentParser(description="The paper's comparison, by simulation.")
    parser.add_argument("--models", default=",".join(SMALLEST), help="which of 7B,13B,34B,70B")
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)), help="numbers of GPUs")
    parser.add_argument("--save", action="store_true", help="also write results/paper-DATE.json")
    options = parser.parse_args()
    models, gpus = options.models.split(","), [int(n) for n in options.gpus.split(",")]
    found = [p for model in models for n in gpus if n >= SMALLEST[model] for p in predictions(model, n)]
    print_table(found)
    print("\n".join(notes(found)))
    line = json.dumps(report(found))
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"benchmarks/results/paper-{date}.json").write_text(line + "\n")
    print(line)


def predictions(model: str, gpus: int, systems: Iterable[str] = tuple(PLANNERS)) -> list[Prediction]:
    """For the four models of one size."""
    cluster, figures = load_cluster(ROOT / f"clusters/a100x{gpus}.yaml"), published()
    return [
        Prediction(
            model,
            gpus,
            system,
            tokens_per_s(ppo(model, scores_samples=system != "hflow"), cluster, PLANNERS[system]),
            figures.get((model, gpus, "hybridflow" if system == "hflow" else system)),
        )
        for system in systems
    ]


def ppo(model: str, scores_samples: bool = False) -> Graph:
    """`scores_samples`: the trainer computes the log-probs of what was sampled once more."""
    return at_the_papers_size("ppo", model, [SCORED_SAMPLES] if scores_samples else ())


def at_the_papers_size(algorithm: str, model: str, files: Sequence[Path] = ()) -> Graph:
    """`algorithms/<algorithm>.yaml` with partial `files` over it, all models Llamas of one size."""
    file = ROOT / f"algorithms/{algorithm}.yaml"
    shape = f"shape:llama-{model.lower()}"
    sizes = {
        **dict.fromkeys(("model", *FURTHER_MODELS.get(algorithm, ())), shape),
        "batch": ROWS,
        "minibatch": UPDATE_ROWS,
        "max_new_tokens": RESPONSE,
        "holdout": ROWS,
    }
    overrides = [f"params.{name}={value}" for name, value in sizes.items()]
    overrides += [f"models.{m.name}.dtype=bf16" for m in hflow.load(file).models]
    overrides += [
        f"nodes.{data}.with.max_{part}_tokens={PROMPT}" for data, part in TEXTS.get(algorithm, PROMPTS)
    ]
    return hflow.load(file, overrides, files)


def tokens_per_s(graph: Graph, cluster: Cluster, planner: Planner) -> float | None:
    """Of the plan of a system's planner; None where nothing fits."""
    token_step_s = VLLM_STEP_S if planner in ON_VLLM else 0.0
    cluster = replace(cluster, token_step_s=token_step_s, whole_rows=planner != "exact")
    try:
        plan = compile_graph(graph, cluster, options=PlannerOptions(planner=planner))
    except HflowError as error:
        if all(d.code in NOTHING_FITS for d in error.diagnostics):
            return None
        raise
    sleeps = _wake_up_s(plan) if planner == "hybridflow" else 0.0
    return plan.tokens_per_step / (plan.step_time_s + sleeps)


def _wake_up_s(plan: Plan) -> float:
    """HybridFlow's engine brings its weights and the cache of a wave back from the host for each rollout."""
    rollout, shape = plan.node("rollout"), plan.shapes["actor"]
    cache = kv_cache_bytes(shape, "bf16", rollout.micro_batch * (PROMPT + RESPONSE), rollout.mesh)
    return wake_up_s(shape, rollout.mesh, cache, plan.cluster)


def wake_up_s(shape: ModelShape, mesh: Mesh, cache_bytes: int, cluster: Cluster) -> float:
    """Until an engine that slept in the host's memory can generate: its own copy of the weights, in bf16, and
    its KV cache, of `cache_bytes`, come back. hflow prices no waking of an SGLang server."""
    return host_transfer_s(resident_bytes(shape, "bf16", mesh, False) + cache_bytes, cluster)


def published() -> Figures:
    lines = (ROOT / "benchmarks/data/ppo_small.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    systems = [system for system in PLANNERS if system != "hflow"]
    return {(r["model"], int(r["gpus"]), system): float(r[system]) for r in rows for system in systems}


def print_table(found: Sequence[Prediction]) -> None:
    """Predicted tokens/s, with the error where a figure is published; a dash where nothing fits."""
    print(f"{'':14}" + "".join(f"{system:>18}" for system in PLANNERS))
    width = len(PLANNERS)
    for row in (found[i : i + width] for i in range(0, len(found), width)):
        label = f"{row[0].model:>5} {row[0].gpus:>4} GPUs"
        print(label + "".join(f"{_cell(p):>18}" for p in row))


def _cell(p: Prediction) -> str:
    if p.predicted is None:
        return "-"
    return f"{p.predicted:,.0f}" + (f" ({p.error:+.0%})" if p.error is not None else "")


def notes(found: Sequence[Prediction]) -> Iterator[str]:
    """What the table cannot mean."""
    for system in PLANNERS:
        shares = [
            p.published / p.predicted for p in found if p.system == system and p.published and p.predicted
        ]
        if shares and max(shares) < 1 / 2:
            low, high = min(shares), max(shares)
            yield f"{system}: published are {low:.0%} to {high:.0%} of what its plan allows on these engines"
    peaks = [uncached_share_of_peak(p) for p in found if p.system == "nemo" and p.published]
    if peaks and min(peaks) > 1:
        yield (
            f"nemo: generation without a KV cache at the published rates would take {min(peaks):.1f} to"
            f" {max(peaks):.1f} times the GPUs' peak FLOP/s, so it cannot have been without one"
        )
    uneven = sorted({p.gpus for p in found if UPDATE_ROWS % p.gpus})
    if uneven:
        yield f"{uneven} GPUs do not divide an update's {UPDATE_ROWS} rows: fixed plans leave some idle"


def report(found: Iterable[Prediction]) -> dict[str, Any]:
    """Mean absolute errors in percent by system, and all predictions."""
    predictions = list(found)
    by_system = {s: [p.error for p in predictions if p.system == s] for s in PLANNERS}
    errors = {s: [abs(e) for e in values if e is not None] for s, values in by_system.items()}
    rows = [asdict(p) | {"error": p.error} for p in predictions]
    return {
        "benchmark": "paper",
        "mape": {s: round(100 * mean(values), 2) for s, values in errors.items() if values},
        "nemo_share_of_peak": {
            f"{p.model}@{p.gpus}": round(uncached_share_of_peak(p), 2)
            for p in predictions
            if p.system == "nemo" and p.published
        },
        "predictions": [{k: _rounded(v) for k, v in row.items()} for row in rows],
    }


def uncached_share_of_peak(p: Prediction) -> float:
    """The share of all GPUs' peak FLOP/s that generation alone takes at the published throughput, if each new
    token reads all before it again. Above 1 it cannot be so."""
    assert p.published
    shape, tokens = NAMED_SHAPES[f"llama-{p.model.lower()}"], ROWS * RESPONSE * (PROMPT + RESPONSE / 2)
    seconds = ROWS * (PROMPT + RESPONSE) / p.published
    peak = load_cluster(ROOT / f"clusters/a100x{p.gpus}.yaml").device.flops * p.gpus
    return forward_flops(shape, tokens, PROMPT / 2 + RESPONSE / 4) / seconds / peak


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
