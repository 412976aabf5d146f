"""Conversations from a model folder to a run: the template in its files, the date in its plan."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

import hflow
from hflow.compiler.compile import compile_graph
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.graph.load import load_text
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.runtime.chat.load_checks import check_chats
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.tokens import tokenised
from hflow.runtime.chat.turns import Turns
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.first_prompts import first_prompts
from hflow.runtime.tools.new_model import new_model

LINE, CLUSTER = "{{- '<|im_start|>' + message.role", load_cluster("clusters/local1.yaml")
TALKS = [
    [
        {"role": "user", "content": f"{i}+1?"},
        {"role": "assistant", "content": str(i + 1)},
        {"role": "user", "content": "and 1?"},
        {"role": "assistant", "content": str(i + 2)},
    ]
    for i in range(8)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_model(tmp_path / "model", layers=1, hidden=16, heads=2, chat_template="chatml", seed=1)
    rows = [{"talk": talk, "question": talk[:1]} for talk in TALKS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def template(folder: Path) -> Path:
    return folder / "model" / "chat_template.jinja"


def graph(folder: Path, turn: str = "role: tool", evaluations: str = "") -> Graph:
    return load_text(f"""\
hflow: 1
name: talks
{evaluations}
models:
  actor: {{path: "{folder}/model"}}
loop: {{name: step, times: 2}}
nodes:
  talks:
    op: data
    with: {{dataset: "{folder}/rows.jsonl", batch: 4, messages: talk, shuffle: false, max_prompt_tokens: 64}}
    out: {{tokens: "i32[batch, seq~]", mask: "bool[batch, resp~]"}}
  asked:
    op: data
    with: {{dataset: "{folder}/rows.jsonl", batch: 4, messages: question, max_prompt_tokens: 64}}
    out: {{tokens: "i32[batch, prompt~]"}}
  said: {{op: generate, model: actor, in: {{prompt: asked.tokens}}, with: {{max_new_tokens: 8}}}}
  tool: {{op: call, fn: hflow.ops.tools.calculator, in: {{text: said.text}}}}
  answer:
    op: generate
    model: actor
    in: {{tokens: said.tokens, logprobs: said.logprobs, observation: tool.observation}}
    with: {{max_new_tokens: 8, max_observation_tokens: 64, {turn}}}
  reward: {{op: call, fn: hflow.ops.tools.calculator, in: {{text: answer.text}}}}
  train:
    op: train
    model: actor
    loss: hflow.ops.losses.negative_log_likelihood
    in: {{tokens: talks.tokens}}
    with: {{lr: 1e-3}}
""")


def check(plan: Plan, folder: Path) -> None:
    check_chats(plan, {"actor": load_tokenizer(folder / "model")})


def test_a_run_learns_what_the_assistant_says_and_tells_its_share(folder: Path) -> None:
    file = template(folder)
    file.write_text("{{- strftime_now('%d %b %Y') + '\\n' }}" + file.read_text())
    plan = compile_graph(graph(folder), CLUSTER, today=date(2026, 11, 23))
    plan.save(folder / "plan.json")
    plan = load_plan(folder / "plan.json")
    assert plan.graph.node("talks").options["date"] == "2026-11-23"
    check(plan, folder)
    run = hflow.execute(plan, workers="inline", run_dir=folder / "run")
    for step, row in enumerate(run.metrics):
        talks = TALKS[4 * step : 4 * step + 4]
        learned = sum(len(t["content"]) + 1 for talk in talks for t in talk if t["role"] == "assistant")
        # Each message has its two marks, role, line ends and content; the last line end is left out.
        written = [len(m["role"]) + len(m["content"]) + 4 for talk in talks for m in talk]
        total = sum(written) + len(talks) * (len("23 Nov 2026\n") - 1)
        assert row["talks.learned_tokens"] == pytest.approx(learned / total, rel=1e-12)


def test_rows_are_shown_with_what_is_learned(folder: Path) -> None:
    file = template(folder)
    file.write_text("{{- strftime_now('%d %b %Y') + '\\n' }}" + file.read_text())
    talk, asked = first_prompts(graph(folder), 1, date(2026, 11, 23))
    question = "23 Nov 2026\n<|im_start|>user\n0+1?<|im_end|>\n<|im_start|>assistant\n"
    head, _, text = talk.partition("\n")
    assert text == (
        f"{question}«1<|im_end|>»\n<|im_start|>user\nand 1?<|im_end|>\n<|im_start|>assistant\n«2<|im_end|>»\n"
    )
    assert head.startswith("talks, row 0: ") and head.endswith(" tokens, 4 learned")
    assert asked.partition("\n")[2] == f"{question}\n"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("<|im_end|>", "!", "ends the assistant's turn with '!"),
        (
            "<|im_end|>",
            "<pad>",
            "ends a turn with `<pad>`, but rollouts end with the tokenizer's `<|im_end|>`",
        ),
        (LINE, "{% if message.role != 'tool' %}" + LINE, "does not write a message of role `tool`"),
        ("{%- for", "{{ raise_exception('never') }}{%- for", "refuses the conversation: never"),
    ],
)
def test_a_template_that_no_rollout_can_follow_is_refused_before_the_first_step(
    folder: Path, old: str, new: str, problem: str
) -> None:
    text = template(folder).read_text().replace(old, new)
    template(folder).write_text(text.replace("\\n' }}", "\\n' }}{% endif %}", 1) if "{% if" in new else text)
    config = folder / "model/generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [0, 1]}))
    with pytest.raises(HflowError) as caught:
        check(compile_graph(graph(folder), CLUSTER), folder)
    assert all(d.code == "HF406" for d in caught.value.diagnostics)
    assert any(problem in d.message for d in caught.value.diagnostics), str(caught.value)


def test_an_unknown_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HflowError, match="unknown chat template `chatlm`"):
        new_model(tmp_path / "model", chat_template="chatlm")


def test_the_template_of_an_evaluation_alone_is_looked_at_too(folder: Path) -> None:
    other = folder / "other.jinja"
    other.write_text(template(folder).read_text().replace(LINE, "{% if message.role != 'tool' %}" + LINE, 1))
    other.write_text(other.read_text().replace("\\n' }}", "\\n' }}{% endif %}", 1))
    data = f'{{dataset: "{folder}/others.jsonl", chat_template: "{other}"}}'
    said = f"evaluations: {{own: {{rows: 2, data: {data}, metrics: {{length: {{length: answer}}}}}}}}"
    check(compile_graph(graph(folder), CLUSTER), folder)
    with pytest.raises(HflowError) as caught:
        check(compile_graph(graph(folder, evaluations=said), CLUSTER), folder)
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF406" and "`answer@own`" in problem.message
    assert "does not write a message of role `tool`" in problem.message


def test_any_number_of_texts_may_have_no_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "model")
    bad = [Turns(f"{i}\u00e9", len(f"{i}\u00e9"), ()) for i in range(1500)]
    found = tokenised(tokenizer, [*bad, Turns("1", 1, ())])
    assert all(isinstance(one, ChatProblem) for one in found[:-1])
    assert not isinstance(found[-1], ChatProblem) and len(found[-1].prompt) == 1
