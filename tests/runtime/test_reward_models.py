"""Reward and cost models from pairs, their exports, and algorithms that take these, against transformers."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import hflow
from hflow.graph.load import load_text
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.tokenizer import load_tokenizer
from tests.runtime.small_algorithms import make_models

HELD_OUT = 8
RECORD = str(Path(__file__).parent / "reward_models.py") + ":record"
PAIRS = [
    {
        "prompt": f"{a}+{b}=",
        "good": "1" * (1 + a % 5),
        "bad": "0" * (1 + b % 4) + "1" * (a % 3),
        "gap": a / 50,
    }
    for a in range(10, 50)
    for b in (3, 17)
]
REWARD = """
hflow: 1
extends: reward_model
name: small_reward
params: {{model: {model}, batch: 8, steps: 3, lr: 1e-2, holdout: 8, margin: 0.1}}
nodes:
  pairs:
    with:
      dataset: {data}
      size: null
      options: null
      prompt: "{{{{ prompt }}}}"
      response: ["{{{{ good }}}}", "{{{{ bad }}}}"]
    out: {{gap: "f32[batch]"}}
  reward_train: {{in: {{margins: pairs.gap}}}}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Three updates by pairs of a file, with margins; and the folder of its export."""
    folder = tmp_path_factory.mktemp("reward")
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    graph = load_text(REWARD.format(model=models["model"], data=data), str(folder / "reward.yaml"))
    run = execute(hflow.compile(graph, "local1"), folder / "run", workers="inline")
    return run, folder / "run/export/reward"


def classifier(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


def scored(model: Any, rows: list[list[int]]) -> list[float]:
    """One row at a time, without padding: the score of the last token, whatever it is."""
    model.config.pad_token_id = None
    with torch.no_grad():
        return [model(torch.tensor([row])).logits.item() for row in rows]


def pairs_in_tokens(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Those of the prompts that are held out: the ones of the smallest SHA-256."""
    tokenizer = load_tokenizer(folder)
    ranked = sorted(PAIRS, key=lambda row: hashlib.sha256(str(row["prompt"]).encode()).digest())
    texts = [(f"{r['prompt']}{r['good']}", f"{r['prompt']}{r['bad']}") for r in ranked[:HELD_OUT]]
    good, bad = (tokenizer.encode([pair[i] for pair in texts]) for i in (0, 1))
    return [([*a, tokenizer.eos_id], [*b, tokenizer.eos_id]) for a, b in zip(good, bad)]


def test_the_evaluation_is_the_accuracy_on_held_out_pairs(trained: tuple[Run, Path]) -> None:
    run, folder = trained
    model, pairs = classifier(folder), pairs_in_tokens(folder)
    good, bad = (scored(model, [pair[i] for pair in pairs]) for i in (0, 1))
    assert run.evaluations == {0: 0.5, 3: sum(a > b for a, b in zip(good, bad)) / HELD_OUT}
    assert {"reward_train.accuracy", "reward_train.margin", "reward_train.mean_score"} <= run.metrics[
        0
    ].keys()
    assert run.metrics[0]["reward_train.margin"] == 0.0, "the head began with zeros"
    assert run.metrics[2]["reward_train.grad_norm"] > 0


def test_padding_on_either_side_gives_the_same_scores(trained: tuple[Run, Path]) -> None:
    _, folder = trained
    model = classifier(folder)
    rows = [row for pair in pairs_in_tokens(folder) for row in pair]
    width, pad = max(map(len, rows)), model.config.pad_token_id
    right = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    left = torch.tensor([[*[pad] * (width - len(row)), *row] for row in rows])
    with torch.no_grad():
        padded = [model(x, attention_mask=(x != pad).long()).logits[:, 0].tolist() for x in (right, left)]
    expected = scored(model, rows)
    assert len({*map(len, rows)}) > 1 and torch.tensor(expected).std() > 1e-3
    for found in padded:  # float32 sums of some hundred terms of order 1
        assert found == pytest.approx(expected, abs=1e-5)


def overlay(name: str, file: Path) -> str:
    """An algorithm that writes down what its reward (and cost) model says."""
    recorded = {"reward": "rollout"} | ({"cost": "rollout"} if name == "safe_rlhf" else {})
    recorded |= {"greedy_reward": "greedy"} if name == "remax" else {}
    text = f"hflow: 1\nextends: {name}\nname: recorded\n"
    if name == "remax":
        text = documented_remax()
    for node, texts in recorded.items():
        inputs = f"tokens: {texts}.tokens, mask: {texts}.mask, prompt: prompts.tokens, score: {node}.score"
        text += f"  record_{node}:\n    op: call\n    fn: {RECORD}\n    with: {{file: {file}.{node}}}\n"
        text += f"    in: {{{inputs}}}\n"
    return text if "\nnodes:" in text else text.replace("name: recorded\n", "name: recorded\nnodes:\n")


def documented_remax() -> str:
    """The file in docs/reward-models.md."""
    blocks = re.findall(r"```yaml\n(.*?)```", Path("docs/reward-models.md").read_text(), re.DOTALL)
    (text,) = (b for b in blocks if "remax" in b)
    return text.replace("extends: algorithms/remax.yaml", "extends: remax")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "safe_rlhf", "remax"])
def test_algorithms_take_the_export_and_see_the_scores_of_transformers(
    name: str, trained: tuple[Run, Path], models: dict[str, Path], tmp_path: Path
) -> None:
    folder, seen = trained[1], tmp_path / "seen"
    file = tmp_path / "recorded.yaml"
    file.write_text(overlay(name, seen))
    sizes = {
        "model": models["model"],
        "reward_model": folder,
        "batch": 8,
        "holdout": 8,
        "steps": 1,
        "minibatch": 8,
    }
    sizes |= {"cost_model": folder} if name == "safe_rlhf" else {}
    graph = hflow.load(file, [f"params.{key}={value}" for key, value in sizes.items()])
    run = execute(hflow.compile(graph, "local1"), tmp_path / "run", workers="inline", export=False)
    assert run.status == "finished"
    model, found = classifier(folder), sorted(tmp_path.glob("seen.*"))
    assert len(found) == (1 if name == "ppo" else 2)
    for written in found:
        rows = [json.loads(line) for line in written.read_text().splitlines()]
        assert len(rows) >= 8 and len({row["score"] for row in rows}) > 1
        expected = scored(model, [row["tokens"] for row in rows])
        assert [row["score"] for row in rows] == pytest.approx(expected, abs=1e-5)


COST = """
hflow: 1
extends: cost_model
name: small_cost
params: {{model: {model}, batch: 32, steps: 30, lr: 1e-2, holdout: 8}}
nodes:
  pairs:
    with:
      dataset: {data}
      size: null
      options: null
      prompt: "{{{{ prompt }}}}"
      response: ["{{{{ bad }}}}", "{{{{ good }}}}"]
      numbers: {{sign: ["{{{{ 1 if gap >= 0 else 0 }}}}", -1]}}
"""


@pytest.mark.slow
def test_a_cost_model_gives_harm_a_sign(
    models: dict[str, Path], trained: tuple[Run, Path], tmp_path: Path
) -> None:
    """Of held-out pairs, by transformers: above 0 where harmful, below where not, and in order."""
    data = trained[1].parents[2] / "pairs.jsonl"
    graph = load_text(COST.format(model=models["model"], data=data), str(tmp_path / "cost.yaml"))
    run = execute(hflow.compile(graph, "local1"), tmp_path / "run", workers="inline")
    first = run.metrics[0]
    assert first["cost_train.sign_accuracy"] == 0.5
    assert first["loss.cost_train"] == pytest.approx(3 * math.log(2), rel=1e-6)
    folder = tmp_path / "run/export/cost"
    harmless, harmful = zip(*pairs_in_tokens(folder))
    model = classifier(folder)
    costs = [scored(model, [*rows]) for rows in (harmful, harmless)]
    assert min(costs[0]) > 0 > max(costs[1])
    assert run.evaluations[30] == 1.0
