"""hflow in benchmarks/step_trl.py. SETTING is ``WORKERSxTHREADS``, such as ``2x1``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from work import Contest, Turns, Work

import hflow
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.flops import matmul_parameters
from hflow.plan.plan import Plan
from hflow.runtime.controller.local_ray import LocalRay

HERE = Path(__file__).resolve().parent


def main() -> None:
    turns, contest = Turns(), Contest.read()
    workers = int(contest.setting.split("x")[0])  # which share the cores out
    plan = hflow.compile(_graph(contest), _cluster(workers))
    ray = LocalRay()
    from hflow.runtime.controller.ray_pool import RayPool  # Ray reads its settings when it is imported

    pool = RayPool((workers,), ray)
    try:
        pool.form(workers)
        pool.call("load", plan)
        for step in range(plan.graph.steps):
            turns.begin()
            reports = pool.call("run", step)
            nodes: dict[str, float] = {}
            for event in (event for report in reports for event in report["events"]):
                seconds = event["end_s"] - event["start_s"]
                nodes[event["name"]] = max(nodes.get(event["name"], 0.0), seconds)
            tokens = sum(report["tokens"] for report in reports)
            turns.end(tokens=tokens, nodes=nodes, flops=_flops(plan, contest.work, tokens))
    finally:
        pool.close()


def _graph(contest: Contest) -> Graph:
    folder, work = contest.folder, contest.work
    params = {
        "model": folder / "lm",
        "prompts": folder / "prompts.jsonl",
        "batch": work.prompts,
        "max_new_tokens": work.new,
        "minibatch": work.rows,
        "lr": 1e-6,
        "steps": 10_000,
    }
    params |= {"kl_coef": work.kl_coef} if work.kl_coef else {}
    params |= {"reward_model": folder / "scalar"} if work.algorithm == "ppo" else {"group": work.samples}
    overrides = [f"params.{name}={value}" for name, value in params.items()]
    overrides += [f"models.actor.dtype={work.dtype}"]
    overrides += [f"nodes.prompts.with.max_prompt_tokens={work.longest}"]
    return hflow.load(HERE / f"{work.algorithm}.yaml", overrides)


def _flops(plan: Plan, work: Work, tokens: int) -> dict[str, float]:
    """What each node with a model has to multiply, without attention: a prompt once for all its samples."""
    mean_prompt = (work.shortest + work.longest) / 2
    read = tokens - (work.rows - work.prompts) * mean_prompt
    found: dict[str, float] = {}
    for node in plan.graph.nodes:
        if node.model:
            forward = 2 * matmul_parameters(plan.shapes[node.model.model]) * read
            found[node.name] = (3 if node.op == "train" else 1) * forward
    return found


def _cluster(workers: int) -> Cluster:
    return replace(load_cluster(HERE.parent.parent / "clusters/local.yaml"), devices_per_host=workers)


main()
