"""Rollouts with older weights, on meshes apart: the same asynchronous schedule written as a plain loop."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hflow
from hflow.graph.ir import Graph
from hflow.plan.node_plan import NodePlan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.engines.python.data import open_source
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.sampling import sample, uniform
from hflow.runtime.tokenizer import load_tokenizer
from tests.runtime.matrix import GRAPHS

STEPS = 4
PLANS = {
    "one worker": ("rollout=tp1@0", "actor_train=tp1@0"),
    "dp2 | tp2": ("rollout=tp2@2-3", "actor_train=dp2@0-1"),
    "pp2 | dp2": ("rollout=dp2@2-3", "actor_train=pp2@0-1"),
    "tp2 | tp1": ("rollout=tp1@2", "actor_train=tp2@0-1"),
}


def graph_of(model: Path, lag: int = 1) -> Graph:
    """Adam's epsilon is so large that rounding noise of a vanishing gradient makes no step of its own."""
    given = [f"params.model={model}", f"params.steps={STEPS}", f"params.lag={lag}"]
    return hflow.load(GRAPHS / "lagged.yaml", [*given, "nodes.actor_train.with.eps=1e-4"])


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[dict[str, Any]]:
    return reference(graph_of(tiny_model))


def reference(graph: Graph) -> list[dict[str, Any]]:
    """Digest, loss and gradient norm of every step, by transformers and torch in one process.

    Step k samples with weights that k - 1 steps have trained (the first two: none), and trains its own.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(graph.model("actor").path, dtype=torch.float32)
    old, optimizer = copy.deepcopy(model), adam(model, graph.node("actor_train").options)
    rollout = graph.node("rollout")
    steps: list[dict[str, Any]] = []
    for step in range(STEPS):
        prompts = [prompt for prompt in draw(graph, step) for _ in range(rollout.options["n"])]
        rows = [respond(old, graph, prompt, step, row) for row, prompt in enumerate(prompts)]
        old.load_state_dict(model.state_dict())
        loss = mean_loss(model, prompts, rows)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            model.parameters(), graph.node("actor_train").options["clip_grad"]
        )
        optimizer.step()
        steps.append({"digest": digest(rows), "loss": loss.item(), "grad_norm": norm.item()})
    return steps


def adam(model: Any, options: Any) -> torch.optim.AdamW:
    """Norms and biases do not decay."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": options["weight_decay"]},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options["lr"], betas=options["betas"], eps=options["eps"])


def draw(graph: Graph, step: int) -> list[list[int]]:
    """The prompts of a step."""
    node = graph.node("prompts")
    source = open_source(node, {"actor": load_tokenizer(graph.model("actor").path)})
    rows = node.options["batch"]
    plan = NodePlan("prompts", "data", None, "python", None, rows, 0.0, 0.0, 0)  # type: ignore[arg-type]
    tokens = source.draw(EngineCall(node, plan, 0, rows, graph.seed, step)).outputs["tokens"]
    assert tokens.lengths is not None
    return [part.tolist() for part in tokens.values.split(tokens.lengths.tolist())]


@torch.no_grad()
def respond(model: Any, graph: Graph, prompt: list[int], step: int, row: int) -> list[int]:
    """The prompt with its sampled response."""
    options, tokens = graph.node("rollout").options, list(prompt)
    for position in range(options["max_new_tokens"]):
        u = uniform(graph.seed, step, torch.tensor([row]), position)
        logits = model(torch.tensor([tokens])).logits[:, -1]
        tokens.append(int(sample(logits, u, options["temperature"])[0]))
        if tokens[-1] == model.config.eos_token_id:
            break
    return tokens


def mean_loss(model: Any, prompts: list[list[int]], rows: list[list[int]]) -> Tensor:
    """Minus the mean log-probability of all sampled tokens."""
    found = []
    for prompt, row in zip(prompts, rows):
        log_probs = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        found.append(log_probs.gather(1, torch.tensor(row[1:])[:, None])[len(prompt) - 1 :, 0])
    return -torch.cat(found).mean()


def digest(rows: list[list[int]]) -> str:
    total = 0
    for number, row in enumerate(rows):
        text = number.to_bytes(8, "little") + b"".join(token.to_bytes(4, "little") for token in row)
        total += int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return f"{total % 2**64:016x}"


def run_of(graph: Graph, pins: tuple[str, ...], workers: Pool, folder: Path) -> Run:
    return execute(hflow.compile(graph, "local4", pins), folder, pool=workers, export=False)


@pytest.mark.parametrize("name", PLANS)
def test_one_update_behind(
    workers: Pool, tiny_model: Path, tmp_path: Path, expected: list[dict[str, Any]], name: str
) -> None:
    run = run_of(graph_of(tiny_model), PLANS[name], workers, tmp_path / "run")
    for mine, theirs in zip(run.metrics, expected, strict=True):
        assert mine["digest.rollout"] == theirs["digest"]
        assert mine["loss.actor_train"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["actor_train.grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_without_lag_it_is_another_run(
    workers: Pool, tiny_model: Path, tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    """The first step is the same; then the newest weights sample something else."""
    run = run_of(graph_of(tiny_model, lag=0), PLANS["dp2 | tp2"], workers, tmp_path / "run")
    same = [mine["digest.rollout"] == theirs["digest"] for mine, theirs in zip(run.metrics, expected)]
    assert same == [True, False, False, False]


def test_async_grpo_on_meshes_apart(workers: Pool, tmp_path: Path, tiny_model: Path) -> None:
    """The shipped algorithm, against one worker."""
    rewards = f"nodes.reward.fn={GRAPHS.parent / 'rewards.py'}:digits"
    sizes = ("batch=8", "group=4", "minibatch=16", "holdout=8", f"steps={STEPS}", f"model={tiny_model}")
    graph = hflow.load("algorithms/async_grpo.yaml", [*(f"params.{size}" for size in sizes), rewards])
    everywhere = ("rollout", "ref_logprobs", "actor_logprobs", "actor_train")
    apart = ("rollout=tp2@2-3", "ref_logprobs=tp1@3", "actor_logprobs=dp2@0-1", "actor_train=tp2@0-1")
    one, other = (
        run_of(graph, pins, workers, tmp_path / name).metrics
        for name, pins in (("one", tuple(f"{node}=tp1@0" for node in everywhere)), ("apart", apart))
    )
    for mine, theirs in zip(other, one, strict=True):
        assert mine["digest.rollout"] == theirs["digest.rollout"]
        assert mine["loss.actor_train"] == pytest.approx(theirs["loss.actor_train"], rel=1e-5, abs=1e-7)
