"""The cost model's prediction of each kind of published figure (see `benchmarks/published.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path

import hflow
from benchmarks import cost_model, paper
from benchmarks.publications.rows import Prediction, Row, UnpredictableError
from hflow.compiler.options import Planner
from hflow.cost.compute import node_time_s
from hflow.cost.redistribution import waking_s
from hflow.diagnostics import HflowError
from hflow.plan.cluster import Cluster, Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.plan import Plan
from hflow.plan.program import SyncWeights
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT, GREATEST_PROMPT = 120, 256  # of NeMo-RL's rows, by their tokens per second and mean responses
# Of vLLM in NeMo-RL's workers, which schedule and launch kernels in turn: what the two fitted rollouts take
# longer than predicted without it, 20.2 and 17.8 s over their 4,050 token steps.
NEMO_RL_STEP_S = 4.7e-3
# How vLLM wakes there with new weights: least squares, in seconds, over the four fitted rows of GRPO weights.
NEMO_RL_WAKE = Link(14.2e9, 7.7)
GRPO_SCORES = ("actor_logprobs", "ref_logprobs")


def predicted(row: Row) -> Prediction:
    if row.lacks:
        return Prediction(row, None, f"hflow has no {row.lacks}")
    try:
        return Prediction(row, PREDICT[row.kind](row))
    except UnpredictableError as none:
        return Prediction(row, None, str(none))


def training(row: Row) -> float:
    if "train" in row.said:
        return _training_in_layout(row)
    asked = {
        "gpu": row.gpu,
        "gpus": str(row.gpus),
        "seq_len": row.said["seq_len"],
        "activation_ckpt": row.said["recompute"],
        "model_params_b": row.model.removeprefix("MPT-").removesuffix("B"),
    }
    clusters = {name: _grown(cluster, row.gpus) for name, cluster in _devices().items()}
    try:
        return cost_model.training(asked, clusters)
    except ValueError as error:  # the largest of no micro-batches
        raise UnpredictableError("no micro-batch fits in memory, by the cost model") from error


def _training_in_layout(row: Row) -> float:
    """Tokens per second of a GPU, with float32 gradients and optimizer states that dp splits (ZeRO-1)."""
    degrees = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", row.said["train"])}
    mesh = Mesh.of(tuple(range(row.gpus)), pp=degrees["pp"], dp=degrees["dp"])
    rows, length, micro_batch = (row.number(key) for key in ("batch", "seq_len", "micro"))
    work = Workload(rows, 0, length, optimizer_steps=1, rows_per_update=rows)
    strategy, cluster = Strategy(zero=1, ep=degrees["ep"]), _grown(_cluster("h100x8"), row.gpus)
    shape = NAMED_SHAPES[row.model]
    seconds = node_time_s("train", shape, "bf16", work, mesh, micro_batch, cluster, strategy)
    return rows * length / row.gpus / seconds


def generation(row: Row) -> float:
    asked = {"model": row.model.removeprefix("llama-"), "tp": str(row.gpus), "batch": row.said["batch"]}
    asked |= {"input_len": row.said["prompt"], "output_len": row.said["response"]}
    tokens_per_s = cost_model.generation(asked, _devices())
    return tokens_per_s / row.gpus if row.unit == "tokens/s/GPU" else tokens_per_s


def transition(row: Row) -> float:
    name = f"{row.model.removeprefix('llama-').upper():>7}  {row.gpus:>3} GPUs"
    return next(found.predicted for found in _transitions() if found.label == name)


def ppo_step(row: Row) -> float:
    """Tokens per second of the plan that the row's system would make."""
    graph = paper.ppo(row.model.removeprefix("llama-").upper(), scores_samples=True)
    planners: dict[str, Planner] = {planner: planner for planner in paper.PLANNERS.values()}
    planner = planners[row.said["planner"]]
    found = paper.tokens_per_s(graph, _grown(_cluster("a100x8"), row.gpus), planner)
    if found is None:
        raise UnpredictableError(f"no plan of the `{planner}` planner fits in memory, by the cost model")
    return found


def grpo_step(row: Row) -> float:
    return _grpo_plan(row).step_time_s


def grpo_rollout(row: Row) -> float:
    return _grpo_plan(row).node("rollout").time_s


def grpo_scores(row: Row) -> float:
    """Log-probs of the actor and of the reference, one after the other on the same devices."""
    return sum(_grpo_plan(row).node(name).time_s for name in GRPO_SCORES)


def grpo_training(row: Row) -> float:
    return _grpo_plan(row).node("actor_train").time_s


def grpo_weights(row: Row) -> float:
    """Until new weights are in the engines; of a row without a layout, the waking of these alone."""
    if "train" not in row.said:
        return waking_s(NAMED_SHAPES[row.model], "bf16", "sglang", 0, _nemo_rl(row.gpus))
    program = _grpo_plan(row).step
    syncs = (sync for sync in program.instructions if isinstance(sync, SyncWeights))
    return next(sync.time_s for sync in syncs if program.edges[sync.edge].target == "rollout")


@cache
def _grpo_plan(row: Row) -> Plan:
    """In the row's layouts: scores are made on the trainer's devices, in its layout."""
    said = row.said
    layout, _, devices = said["train"].partition("@")
    recompute = ",recompute" if said.get("recompute") == "yes" else ""
    micro, scores = (f",micro{said[key]}" if key in said else "" for key in ("micro", "micro_scores"))
    pins = [f"actor_train={layout}{recompute}{micro}@{devices}", f"rollout={said['generate']}"]
    pins += [f"{node}={layout}{scores}@{devices}" for node in GRPO_SCORES]
    sets = {
        "params.model": f"shape:{row.model}",
        "params.batch": said["prompts"],
        "params.group": said["samples"],
        "params.max_new_tokens": said["sequence"],
        "params.minibatch": said["minibatch"],
        "params.holdout": said["prompts"],
        "models.actor.dtype": "bf16",
        "models.ref.dtype": "bf16",
        "nodes.prompts.with.max_prompt_tokens": str(GREATEST_PROMPT),
        "nodes.prompts.lengths.mean": str(PROMPT),
        "nodes.rollout.lengths.mean": said["response"],
        "nodes.rollout.model": f"{{use: actor, lag: {said['lag']}}}",
        "nodes.actor_train.with.max_lag": said["lag"],
    }
    try:
        graph = hflow.load(ROOT / "algorithms/async_grpo.yaml", [f"{k}={v}" for k, v in sets.items()])
        return hflow.compile(graph, _nemo_rl(row.gpus), pins, engines="rollout=sglang")
    except HflowError as error:
        raise UnpredictableError(refusal(error)) from error


def _nemo_rl(gpus: int) -> Cluster:
    return replace(_grown(_cluster("h100x8"), gpus), token_step_s=NEMO_RL_STEP_S, wake=NEMO_RL_WAKE)


def refusal(error: HflowError) -> str:
    """Why there is no plan: the details of the diagnostics, each once."""
    said = (d.help.rsplit(": ", 1)[-1] if d.code == "HF302" else d.message for d in error.diagnostics)
    return "; ".join(dict.fromkeys(said))


PREDICT: Mapping[str, Callable[[Row], float]] = {
    "training": training,
    "generation": generation,
    "transition": transition,
    "PPO step": ppo_step,
    "GRPO step": grpo_step,
    "GRPO rollout": grpo_rollout,
    "GRPO scores": grpo_scores,
    "GRPO training": grpo_training,
    "GRPO weights": grpo_weights,
}


@cache
def _devices() -> cost_model.Clusters:
    found = cost_model.shipped_clusters()
    return {name: replace(cluster, whole_rows=True) for name, cluster in found.items()}


@cache
def _transitions() -> Sequence[cost_model.Result]:
    return tuple(cost_model.transition_results())


@cache
def _cluster(name: str) -> Cluster:
    """Of systems that pass each row whole, as all of the published ones do."""
    return replace(load_cluster(ROOT / f"clusters/{name}.yaml"), whole_rows=True)


def _grown(cluster: Cluster, gpus: int) -> Cluster:
    """As many hosts as `gpus` need."""
    hosts = ceil(gpus / cluster.devices_per_host)
    return replace(cluster, name=f"{cluster.name.rsplit('x', 1)[0]}x{gpus}", hosts=hosts)
