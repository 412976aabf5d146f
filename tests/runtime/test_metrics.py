"""Which numbers of a step are its headline: the reward and the tokens of what is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.graph.ir import Graph
from hflow.plan.workload import token_makers
from hflow.runtime.controller.metrics import merge

VALIDATED = """
hflow: 1
extends: grpo
name: validated
eval: {metric: checked.score}
nodes:
  validation:
    op: generate
    model: actor
    in: {prompt: prompts.tokens}
    with: {max_new_tokens: 8, temperature: 0.0}
  checked:
    op: call
    fn: hflow.ops.rewards.exact_match
    in: {text: validation.text, answer: prompts.answer}
"""
ALGORITHMS = sorted(file.stem for file in Path("algorithms").glob("*.yaml"))


@pytest.fixture
def validated(tmp_path: Path) -> Graph:
    file = tmp_path / "validated.yaml"
    file.write_text(VALIDATED)
    return hflow.load(file)


def report(**metrics: float) -> dict[str, Any]:
    found = {name.replace("__", "."): (value, 1.0) for name, value in metrics.items()}
    return {"metrics": found, "tokens": 5, "events": [], "digests": {}}


def ran(kind: str, name: str, *times: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"kind": kind, "name": name, "start_s": start, "end_s": end} for start, end in times]


def test_waiting_for_others_is_no_time_of_what_workers_do_together(validated: Graph) -> None:
    """Two workers. Rollouts are of each alone, and here in two rounds; training and edges exchange."""
    edge = "rollout.tokens -> actor_train"
    events = [
        [
            *ran("call", "rollout", (0.0, 2.0), (2.0, 3.0)),
            *ran("transfer", edge, (3.0, 5.5)),
            *ran("call", "actor_train", (5.5, 9.0)),
        ],
        [
            *ran("call", "rollout", (0.0, 1.0), (2.0, 5.0)),
            *ran("transfer", edge, (5.0, 5.5)),
            *ran("call", "actor_train", (6.0, 9.5)),
        ],
    ]
    reports = [report(actor_train__loss=0.1) | {"events": of} for of in events]
    line = merge(validated, 0, reports, 9.5)
    assert line["time_s.rollout"] == 2 + 3
    assert line[f"time_s.{edge}"] == 0.5
    assert line["time_s.actor_train"] == 3.5


def test_the_reward_is_of_what_is_trained_on(validated: Graph) -> None:
    """Not of the validation, though that is what the evaluation measures."""
    line = merge(validated, 0, [report(actor_train__loss=0.1, reward__score=0.5, checked__score=0.9)], 1.0)
    assert line["reward_mean"] == 0.5
    assert line["checked.score"] == 0.9


def test_a_validation_alone_is_no_reward(tmp_path: Path) -> None:
    """Where training reads no score, as in fine-tuning, there is no reward to show."""
    file = tmp_path / "sft.yaml"
    nodes = VALIDATED.partition("nodes:\n")[2].replace("prompts.", "sums.")
    sums = "  sums:\n    op: data\n    with: {dataset: d.jsonl, batch: 4, holdout: 4, prompt: '{{ q }}'"
    sums += ", max_prompt_tokens: 8}\n    out: {tokens: 'i32[batch, prompt~]', answer: 'str[batch]'}\n"
    head = "hflow: 1\nextends: sft\nname: s\neval: {metric: checked.score, rows: 4}\nnodes:\n"
    file.write_text(f"{head}{sums}{nodes}")
    graph = hflow.load(file)
    assert graph.reward == ""
    assert [n.name for n in token_makers(graph)] == ["actor_train"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shipped_algorithms_show_their_reward(name: str) -> None:
    others = {"sft": "", "dpo": "", "reward_model": "agreement.accuracy", "cost_model": "agreement.accuracy"}
    assert hflow.load(name).reward == others.get(name, "reward.score")


def test_tokens_are_those_of_rollouts_that_are_trained_on(validated: Graph) -> None:
    """ReMax's greedy rollout only gives a baseline; of several turns the last has all texts."""
    makers = {name: [n.name for n in token_makers(hflow.load(name))] for name in ALGORITHMS}
    others = {"sft": ["actor_train"], "dpo": ["actor_train"], "tool_grpo": ["turn_3"]}
    others |= {"reward_model": ["reward_train"], "cost_model": ["cost_train"]}
    assert makers == {name: others.get(name, ["rollout"]) for name in ALGORITHMS}
    assert [n.name for n in token_makers(validated)] == ["rollout"]
