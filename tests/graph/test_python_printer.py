"""A graph file written as Python: the program that is printed builds an equal graph."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.builder.python_printer import to_python
from hflow.graph.builder.python_text import WIDTH, literal
from hflow.graph.ir import Graph
from hflow.graph.load import assembled, load_text, read_graph
from hflow.graph.source.document import parse
from hflow.graph.write.printer import ir

ROOT = Path(__file__).parent.parent.parent
FILES = sorted([*ROOT.glob("algorithms/*.yaml"), *ROOT.glob("examples/*/*.yaml")])
EVERYTHING = """\
hflow: 1
name: everything
seed: 3
params: {size: 8}
models:
  actor: {path: models/tiny}
  adapted: {path: models/tiny, head: scalar, adapter: 8}
  sharing: {path: models/tiny, head: scalar, adapter: {rank: 4, alpha: 16, targets: q_proj}, base: adapted}
  reference: {path: models/tiny, frozen: true, refresh: {from: actor, every: 5, decay: 0.9}}
  scores: {path: models/tiny, head: scalar, frozen: true}
loop: {name: round, times: 3}
eval: {metric: scores.score, rows: 4}
evaluations:
  greedy: {rows: 8, metrics: {pass: {pass: scores.score, k: 2}}, sampling: {n: 2}, at: [end]}
nodes:
  actor_train: # before what it reads
    op: train
    model: actor
    loss: hflow.ops.losses.reinforce
    in:
      tokens: lambda.tokens
      old_logprobs: lambda.logprobs
      ref_logprobs: ref_logprobs.logprobs
      advantages: baseline.advantages
    with: {lr: 0.001, kl_coef: 0.1, max_lag: 1}
  lambda: # a word of Python's
    op: generate
    model: {use: actor, lag: 1}
    lengths: {mean: 3}
    in: {prompt: g.tokens}
    with: {n: 2, max_new_tokens: 4}
  scores: {op: score, model: scores, in: {tokens: lambda.tokens}} # called as its model
  ref_logprobs: {op: score, model: reference, in: {tokens: lambda.tokens}, after: scores}
  baseline:
    op: call
    fn: hflow.ops.baselines.moving_baseline
    in: {score: scores.score, baseline: {from: baseline.baseline, lag: 1, init: 0.5}}
  values: {op: score, model: adapted, in: {tokens: lambda.tokens}}
  others: {op: score, model: sharing, in: {tokens: lambda.tokens}}
  shaped:
    op: call
    fn: hflow.ops.shaping.token_rewards
    in: {score: scores.score, logprobs: lambda.logprobs, ref_logprobs: ref_logprobs.logprobs}
    with: {kl_coef: 0.1}
  gae: {op: call, fn: hflow.ops.gae.gae, in: {values: values.values, rewards: shaped.rewards}}
  others_gae: {op: call, fn: hflow.ops.gae.gae, in: {values: others.values, rewards: shaped.rewards}}
  adapted_train:
    op: train
    model: adapted
    loss: hflow.ops.values.value_clip
    in: {tokens: lambda.tokens, old_values: values.values, returns: gae.returns}
    with: {lr: 0.001}
  sharing_train:
    op: train
    model: sharing
    loss: hflow.ops.values.value_clip
    in: {tokens: lambda.tokens, old_values: others.values, returns: others_gae.returns}
    with: {lr: 0.001}
  g: # the program's own name
    op: data
    with:
      dataset: reasoning-gym/chain_sum
      size: 64
      batch: "${ size }"
      prompt: "{{ question }}\\n"
      max_prompt_tokens: 64
      holdout: 8
    out: {tokens: "i32[batch, prompt~]"}
"""


def built(program: str) -> Graph:
    space: dict[str, Any] = {}
    exec(compile(program, "built.py", "exec"), space)  # relative paths are those of the folder, as in a file
    return space["graph"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_program_builds_the_graph_of_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = assembled(read_graph(file))
    program = to_python(document)
    monkeypatch.chdir(file.parent)
    assert ir(built(program)) == ir(load_text(document.text, file.name))


def test_whatever_a_file_may_say_is_said() -> None:
    program = to_python(assembled(parse(EVERYTHING, "everything.yaml")))
    assert ir(built(program)) == ir(load_text(EVERYTHING))
    assert 'lambda_ = g.generate(\n    "lambda",\n    model=actor,\n    lag=1,' in program
    assert 'scores_ = g.score("scores", model=scores, tokens=lambda_.tokens)' in program
    assert 'baseline=g.previous("baseline.baseline", lag=1, init=0.5)' in program
    assert "\ng.train(\n" in program, "nothing reads it, so it has no variable"


def test_expressions_and_overrides_stay() -> None:
    program = to_python(assembled(read_graph(ROOT / "algorithms/grpo.yaml"), ["params.batch=64"]))
    assert '"batch": 64,' in program and 'batch="${ batch }",' in program
    assert built(program).node("actor_train").rows == 64 * 8


ODD = """\
hflow: 1
name: odd
params: {signal: judge.score, spread: 0.5}
models: {actor: {path: models/tiny}, judge: {path: models/tiny, head: scalar, frozen: true}}
loop: {name: step, times: 3}
nodes:
  prompts:
    op: data
    with: {dataset: rows.jsonl, batch: 8, prompt: "{{ q }}", max_prompt_tokens: 8, shuffle: false}
    out: {tokens: "i32[batch, prompt~]", _id: "str[batch]"}
  rollout: {op: generate, model: actor, in: {prompt: prompts.tokens}, with: {n: 2, max_new_tokens: 4}}
  judge_: {op: score, model: judge, in: {tokens: rollout.tokens}}
  judge: {op: score, model: judge, in: {tokens: rollout.tokens}}
  limited:
    op: call
    fn: ./odd.py:limited
    in: {name: "${ signal }", other: judge_.score, which: prompts._id}
    with: {limit: null, spread: "${ spread }"}
  baseline:
    op: call
    fn: hflow.ops.baselines.moving_baseline
    in: {score: limited.score, baseline: {from: baseline.baseline, lag: 1, init: 0}}
"""
FUNCTION = """\
from hflow.ops.op import op

@op("name: f32[rows*k], other: f32[rows*k], which: str[rows] -> score: f32[rows*k]")
def limited(name, other, which, *, limit: float | None = 1.0, spread: float = 0.0):
    return name
"""


def test_names_that_are_taken_and_options_that_are_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node called as a model, another one as what it would be called then; inputs called as parameters of
    the builder; an expression that names a value."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(FUNCTION)
    program = to_python(assembled(parse(ODD, "odd.yaml")))
    assert "judge__ = g.score(" in program and "limit=None" in program and 'prompts["_id"]' in program
    assert ir(built(program)) == ir(load_text(ODD, "odd.yaml"))
    assert literal({"x": [math.inf, -math.inf]}) == '{"x": [float("inf"), float("-inf")]}'


def test_an_input_that_is_a_keyword_of_the_builder_is_refused() -> None:
    text = EVERYTHING.replace("in: {score: scores.score, baseline:", "in: {after: scores.score, baseline:")
    with pytest.raises(HflowError, match="HF106.*`after` of `baseline`"):
        to_python(assembled(parse(text, "everything.yaml")))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_ruff_would_not_write_it_otherwise(file: Path) -> None:
    program = to_python(assembled(read_graph(file)))
    options = ["format", "--isolated", "--line-length", str(WIDTH), "-"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *options], input=program, capture_output=True, text=True, check=True
    )
    assert done.stdout == program


def test_the_command_prints_it() -> None:
    command = [sys.executable, "-m", "hflow.cli.app", "show", "grpo", "--python", "--set", "params.batch=64"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert built(done.stdout).name == "grpo"
