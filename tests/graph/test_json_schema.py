from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hflow.graph.source.document import parse, read
from hflow.graph.write.json_schema import json_schema, json_schema_text

GRAPHS = sorted(Path("tests/runtime/graphs").glob("*.yaml"))
ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
FILE = Path("docs/schema/graph.v1.json")
VALIDATOR = jsonschema.Draft7Validator(json_schema())


def refusals(text: str) -> list[str]:
    return [e.message for e in VALIDATOR.iter_errors(parse(text, "x").plain())]


def test_it_is_a_draft_7_schema() -> None:
    jsonschema.Draft7Validator.check_schema(json_schema())


def test_the_file_is_up_to_date() -> None:
    """To accept a change: hflow schema > docs/schema/graph.v1.json"""
    assert FILE.read_text() == json_schema_text()


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_algorithms_are_valid(path: Path) -> None:
    assert list(VALIDATOR.iter_errors(read(path).plain())) == []


def references(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        own = {schema["$ref"]} if "$ref" in schema else set[str]()
        return own.union(*map(references, schema.values()))
    return set[str]().union(*map(references, schema)) if isinstance(schema, list) else set()


def test_every_reference_leads_somewhere() -> None:
    schema = json_schema()
    assert references(schema) == {f"#/definitions/{name}" for name in schema["definitions"]}


WHOLE = """\
hflow: 1
name: x
params: {steps: 3}
models: {actor: {path: p}}
loop: {name: step, times: "${ steps }"}
run: {checkpoint: {every: "${ steps }", seconds: 1.5, best: loss.x}, export: best,
      grace: 5, hang: {least: 9.5}}
nodes:
  prompts: {op: data, with: {dataset: d, batch: 1, prompt: p}, out: {tokens: "i32[batch, prompt~]"}}
  rollout: {op: generate, model: {use: actor, lag: 1}, in: {prompt: prompts.tokens}, with: {n: 3}}
  more: {op: generate, model: actor, with: {max_new_tokens: "${ steps }", top_p: 1, in_flight: false}}
  scores: {op: call, fn: hflow.ops.advantages.group_normalise, in: {score: a.b}, with: {std: none}}
  own: {op: call, fn: "./mine.py:f", with: {anything: [1]}}
  actor_train: {op: train, model: actor, loss: hflow.ops.losses.ppo_clip, with: {lr: 1e-4, clip: 0.2}}
  other_train: {op: train, model: actor, loss: "./mine.py:loss", with: {lr: "${ steps }", mine: true}}
"""
CHILD = """\
hflow: 1
extends: grpo.yaml
name: x
params: {steps: null, lr: 1e-4}
models: {ref: null, actor: {frozen: null}}
eval: null
run: {checkpoint: 10, export: null, hang: false}
nodes:
  rollout: {model: {lag: 1}, with: {n: null}, in: null}
  reward: null
  actor_train: {loss: hflow.ops.losses.cispo, with: {clip: null, kl_coef: null, lr: 1}}
"""


OVER = """\
params: {steps: 4}
nodes:
  rollout: {with: {n: 4, top_p: null}}
  reward: null
  rewards: {op: call, fn: hflow.ops.rewards.exact_match, in: {text: rollout.text}}
"""


@pytest.mark.parametrize("path", GRAPHS, ids=lambda p: p.stem)
def test_graphs_that_run_are_valid(path: Path) -> None:
    """Whole ones, children, and those for `-f`, with own functions and without."""
    assert list(VALIDATOR.iter_errors(read(path).plain())) == []


@pytest.mark.parametrize("text", [WHOLE, CHILD, OVER])
def test_good_files(text: str) -> None:
    assert refusals(text) == []


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (WHOLE, "name: x\n", ""),
        (WHOLE, "hflow: 1", "hflow: 2"),
        (WHOLE, "path: p", "pth: p"),
        (WHOLE, '"${ steps }"', "many"),
        (WHOLE, "lag: 1", "lag: -1"),
        (WHOLE, "op: generate", "op: sample"),
        (WHOLE, "prompt: prompts.tokens", "prompt: prompts"),
        (WHOLE, "steps: 3", "steps: [3]"),
        (WHOLE, "actor: {path: p}", "actor: null"),
        (CHILD, "name: x\n", ""),
        (CHILD, "lag: 1", "lags: 1"),
        (WHOLE, "best: loss.x", "best: 'loss x'"),
        (WHOLE, "export: best", "export: first"),
        (CHILD, "checkpoint: 10", "checkpoint: -1"),
        (CHILD, "checkpoint: 10", "checkpoint: true"),
        (CHILD, "checkpoint: 10", "chekpoint: 10"),
        (CHILD, "extends: grpo.yaml\n", ""),
        (OVER, "op: call", "op: cal"),
        (OVER, "nodes:", "node:"),
        (OVER, "fn: hflow", "with: {strip: true}, fn: hflow"),
        (WHOLE, "batch: 1", "batch: 0"),
        (WHOLE, "batch: 1", "batches: 1"),
        (WHOLE, "with: {n: 3}", "with: {nn: 3}"),
        (WHOLE, "with: {n: 3}", "with: {n: 3, top_pp: 0.5}"),
        (WHOLE, "with: {n: 3}", "with: {n: 3, top_p: high}"),
        (WHOLE, "lr: 1e-4", "lrr: 1e-4"),
        (WHOLE, "lr: 1e-4", "lr: 1e-4, aggregate: mean"),
        (WHOLE, "lr: 1e-4", "lr: 1e-4, lam: 1"),
        (WHOLE, "std: none", "std: no"),
        (WHOLE, "std: none", "stdd: none"),
    ],
)
def test_bad_files(text: str, old: str, new: str) -> None:
    assert text.replace(old, new) != text
    assert refusals(text.replace(old, new))
