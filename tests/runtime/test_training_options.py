"""A schedule, frozen parameters and an averaged reference in whole runs, against a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, get_scheduler

import hflow
from hflow.graph.ir import Graph
from hflow.plan.node_plan import NodePlan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.engines.python.data import open_source
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import new_model
from tests.runtime.graphs.functions import preference
from tests.runtime.matrix import GRAPHS

STEPS, MINIBATCHES = 4, 2
FROZEN = ("model.embed_tokens", "model.layers.0.")


def graph_of(model: Path, *more: str) -> Graph:
    given = [f"params.model={model}", f"params.steps={STEPS}", *more]
    return hflow.load(GRAPHS / "averaged.yaml", given)


def reference(graph: Graph) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses of all steps, the last weights and all rates, by transformers and torch in one process.

    Before every `every`-th step the reference moves towards the actor's weights.
    """
    actor, ref = (_loaded(graph.model(name).path) for name in ("actor", "ref"))
    refresh, options = graph.model("ref").refresh, graph.node("actor_train").options
    assert refresh
    for name, parameter in actor.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    trained = [p for p in actor.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": options["weight_decay"]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=options["lr"], betas=options["betas"], eps=options["eps"])
    special = {"num_decay_steps": options["decay_steps"], "decay_type": "linear"}
    special["min_lr_ratio"] = options["min_lr"] / options["lr"]
    scheduler = get_scheduler(
        "warmup_stable_decay", adam, options["warmup_steps"], STEPS * MINIBATCHES,
        scheduler_specific_kwargs=special,
    )  # fmt: skip
    losses: list[float] = []
    rates: list[float] = []
    for step in range(STEPS):
        if step and step % refresh.every == 0:
            _average(ref, actor, refresh.decay)
        tokens, mask = draw(graph, step)
        own: list[float] = []
        for part in range(MINIBATCHES):
            rows = [r for r in range(len(tokens)) if r // 2 % MINIBATCHES == part]
            loss = _loss(actor, ref, [tokens[r] for r in rows], [mask[r] for r in rows])
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, options["clip_grad"])
            rates.append(float(scheduler.get_last_lr()[0]))
            adam.step()
            scheduler.step()
            own.append(loss.item())
        losses.append(sum(own) / MINIBATCHES)
    return losses, {name: p.detach() for name, p in actor.named_parameters()}, rates


def _loaded(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def _average(ref: Any, actor: Any, decay: float) -> None:
    for average, weight in zip(ref.parameters(), actor.parameters(), strict=True):
        average.copy_(decay * average + (1 - decay) * weight)


def _loss(actor: Any, ref: Any, tokens: list[list[int]], lengths: list[int]) -> torch.Tensor:
    widest = max(lengths)
    ours, mask = zip(*(_log_probs(actor, row, n, widest) for row, n in zip(tokens, lengths)))
    with torch.no_grad():
        theirs = [_log_probs(ref, row, n, widest)[0] for row, n in zip(tokens, lengths)]
    pairs = lambda rows: torch.stack(list(rows)).view(-1, 2, widest)  # noqa: E731
    return preference(pairs(ours), pairs(theirs), pairs(mask)).mean()


def _log_probs(model: Any, row: list[int], length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the last `length` tokens of a row, and which they are, padded to `width`."""
    found = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
    chosen = found.gather(1, torch.tensor(row[1:])[:, None])[len(row) - length - 1 :, 0]
    padding = (0, width - length)
    mask = torch.nn.functional.pad(torch.ones(length), padding).bool()
    return torch.nn.functional.pad(chosen, padding), mask


def draw(graph: Graph, step: int) -> tuple[list[list[int]], list[int]]:
    """Tokens of all rows of a step, and how many of each are the response."""
    node = graph.node("texts")
    source = open_source(node, {"actor": load_tokenizer(graph.model("actor").path)})
    batch = node.options["batch"]
    plan = NodePlan("texts", "data", None, "python", None, batch, 0.0, 0.0, 0)  # type: ignore[arg-type]
    outputs = source.draw(EngineCall(node, plan, 0, batch, graph.seed, step)).outputs
    return outputs["tokens"].lists(), [len(row) for row in outputs["mask"].lists()]


def same(run: Run, graph: Graph) -> None:
    losses, weights, rates = reference(graph)
    # The same float32 sums in another order, over eight updates
    assert [line["loss.actor_train"] for line in run.metrics] == pytest.approx(losses, rel=1e-5, abs=1e-6)
    means = [sum(rates[i : i + MINIBATCHES]) / MINIBATCHES for i in range(0, len(rates), MINIBATCHES)]
    assert [line["actor_train.lr"] for line in run.metrics] == pytest.approx(means, rel=1e-9)
    exported = load_file(run.folder / "export/actor/model.safetensors")
    assert exported.keys() == weights.keys()
    for name, expected in weights.items():
        torch.testing.assert_close(exported[name], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_one_worker_equals_a_plain_loop(tiny_model: Path, tmp_path: Path, every: int) -> None:
    graph = graph_of(tiny_model, f"params.every={every}")
    plan = hflow.compile(graph, "local4", ["actor_train=tp1@0", "ref_logprobs=tp1@0"])
    same(execute(plan, tmp_path / "run", workers="inline"), graph)
    exported, begun = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "run/export/actor", tiny_model)
    )
    for name, values in begun.items():
        assert torch.equal(exported[name], values) == name.startswith(FROZEN), name


@pytest.mark.slow
def test_an_average_begins_with_the_weights_of_the_model_that_takes_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    new_model(
        other, family="qwen2", layers=4, hidden=32, heads=4, kv_heads=4, ffn=64,
        alphabet="0123456789+=. ", max_positions=64, tied=False, seed=9,
    )  # fmt: skip
    graph = graph_of(tiny_model, f"params.ref={other}")
    plan = hflow.compile(graph, "local4", ["actor_train=tp1@0", "ref_logprobs=tp1@0"])
    run = execute(plan, tmp_path / "run", workers="inline")
    same(run, graph)
    alike = graph_of(tiny_model)
    assert abs(run.metrics[1]["loss.actor_train"] - reference(alike)[0][1]) > 1e-3


@pytest.mark.parametrize("pins", [
    ("actor_train=dp2,zero1@0-1", "ref_logprobs=tp2@2-3"),
    ("actor_train=pp2,tp2@0-3", "ref_logprobs=dp4@0-3"),
], ids=str)  # fmt: skip
def test_other_layouts_equal_it_too(
    workers: Pool, tiny_model: Path, tmp_path: Path, pins: tuple[str, ...]
) -> None:
    """The average moves as a weight edge, from the trainer's layout to the reader's."""
    graph = graph_of(tiny_model)
    plan = hflow.compile(graph, "local4", pins)
    same(execute(plan, tmp_path / "run", pool=workers), graph)
