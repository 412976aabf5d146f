"""Conversations in graphs: what later turns inherit, and the date of the day of compilation."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from hflow.compiler.compile import compile_graph
from hflow.graph.changes import changes
from hflow.graph.ir import Graph
from hflow.graph.load import load_text
from hflow.graph.write.yaml_printer import to_yaml
from hflow.plan.chat_dates import keep_dates, with_dates
from hflow.plan.cluster_file import load_cluster
from hflow.plan.digests import changed_models, digests_of
from hflow.plan.dtypes import keep_dtypes
from tests.model_folder import CONFIG

TODAY, LATER = date(2026, 11, 23), date(2026, 11, 24)
ASKS = "{{ strftime_now('%Y') }}"


EVALUATED = """\
evaluations:
  test: {rows: 2, metrics: {length: {length: answer}}}
  own: {rows: 2, data: {dataset: other.jsonl}, metrics: {length: {length: answer}}}
"""


def graph(folder: Path | str, more: str = "", turn: str = "", evaluations: str = "") -> Graph:
    return load_text(f"""\
hflow: 1
name: talks
{evaluations}
models:
  actor: {{path: "{folder}"}}
loop: {{name: step, times: 2}}
nodes:
  asked:
    op: data
    with: {{dataset: rows.jsonl, batch: 4, messages: talk, max_prompt_tokens: 32{more}}}
    out: {{tokens: "i32[batch, prompt~]"}}
  said: {{op: generate, model: actor, in: {{prompt: asked.tokens}}, with: {{max_new_tokens: 8}}}}
  tool: {{op: call, fn: hflow.ops.tools.calculator, in: {{text: said.text}}}}
  answer:
    op: generate
    model: actor
    in: {{tokens: said.tokens, logprobs: said.logprobs, observation: tool.observation}}
    with: {{max_new_tokens: 8, max_observation_tokens: 32{turn}}}
  train:
    op: train
    model: actor
    loss: hflow.ops.losses.negative_log_likelihood
    in: {{tokens: answer.tokens}}
    with: {{lr: 1e-4}}
""")


def test_later_turns_go_on_as_the_conversation_was_begun() -> None:
    arguments = ", template_args: {enable_thinking: false, depth: [1, {a: b}]}, chat_template: tool_use"
    inherited = graph("shape:tiny", arguments, ", role: tool")
    own = graph("shape:tiny", arguments, ", role: tool, template_args: {x: 1}")
    expected = {"enable_thinking": False, "depth": [1, {"a": "b"}]}
    assert inherited.node("answer").options["template_args"] == expected
    assert inherited.node("answer").options["chat_template"] == "tool_use"
    assert own.node("answer").options["template_args"] == {"x": 1}
    assert "template_args" not in graph("shape:tiny", arguments).node("answer").options
    assert "role" not in graph("shape:tiny").node("answer").options
    assert load_text(to_yaml(inherited)) == inherited


def test_a_graph_without_conversations_has_none_of_their_options() -> None:
    """So that plans of graphs that were there before stay what they are."""
    plain = load_text(Path("algorithms/grpo.yaml").read_text(), "algorithms/grpo.yaml")
    assert {"messages", "learn", "date", "role"}.isdisjoint(o for n in plain.nodes for o in n.options)
    assert with_dates(plain, TODAY) is plain


def templates(folder: Path, kind: str) -> Path:
    """A folder whose chat template stands in a file of some kind."""
    if kind == "text":
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": ASKS}))
    elif kind == "named":
        named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": ASKS}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    elif kind == "file":
        (folder / "chat_template.jinja").write_text(ASKS)
    elif kind == "more":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/rag.jinja").write_text(ASKS)
    return folder


@pytest.mark.parametrize("kind", ["text", "named", "file", "more"])
def test_the_day_is_written_where_a_template_asks_for_it(tmp_path: Path, kind: str) -> None:
    talks = graph(templates(tmp_path, kind))
    assert with_dates(talks, TODAY).node("asked").options["date"] == "2026-11-23"
    assert with_dates(with_dates(talks, TODAY), LATER) == with_dates(talks, TODAY)
    said = graph(tmp_path, ", date: 2031-02-01")
    assert with_dates(said, TODAY) == said and said.node("asked").options["date"] == "2031-02-01"


def test_no_day_is_written_where_nothing_asks(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert with_dates(graph(tmp_path), TODAY) == graph(tmp_path)
    assert with_dates(graph("shape:tiny"), TODAY) == graph("shape:tiny")
    assert with_dates(graph("no/folder"), TODAY) == graph("no/folder")
    asks = tmp_path / "asks.jinja"
    asks.write_text(ASKS)
    named = graph(tmp_path, f', chat_template: "{asks}"')
    assert with_dates(named, TODAY).node("asked").options["date"] == "2026-11-23"


def test_a_plan_has_the_day_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    folder = templates(tmp_path, "file")
    cluster = load_cluster("clusters/local.yaml")
    plans = [compile_graph(graph(folder), cluster, today=day) for day in (TODAY, LATER)]
    first, second = (plan.graph.node("asked").options["date"] for plan in plans)
    assert (first, second) == ("2026-11-23", "2026-11-24") and plans[0].hash != plans[1].hash
    kept = keep_dtypes(plans[0].graph, keep_dates(plans[0].graph, graph(folder)))
    assert kept.node("asked").options["date"] == first
    assert not changes(plans[0].graph, kept)
    assert compile_graph(kept, cluster, today=LATER).hash == plans[0].hash
    (change,) = changes(plans[0].graph, plans[1].graph)
    assert change.key == "nodes.asked.with.date" and "date" in change.meaning
    said = graph(folder, ", date: 2031-02-01")
    assert keep_dates(plans[0].graph, said) == said


def test_a_template_that_changes_after_compilation_is_noticed(tmp_path: Path) -> None:
    talks = graph(templates(tmp_path, "file"))
    then = digests_of(talks)
    assert not list(changed_models(talks, then))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (problem,) = changed_models(talks, then)
    assert problem.code == "HF406" and "`chat_template.jinja`" in problem.message


def test_turns_in_evaluations_go_on_as_the_conversation_was_begun() -> None:
    arguments = ", template_args: {depth: 2}, chat_template: tool_use, holdout: 2"
    talks = graph("shape:tiny", arguments, ", role: tool", EVALUATED)
    for evaluation in talks.evaluations:
        answer = next(node for node in evaluation.nodes if node.name.startswith("answer@"))
        assert answer.options["template_args"] == {"depth": 2}
        assert answer.options["chat_template"] == "tool_use"
    assert load_text(to_yaml(talks)) == talks


def dates(talks: Graph) -> set[str | None]:
    nodes = (*talks.nodes, *(node for evaluation in talks.evaluations for node in evaluation.nodes))
    return {node.options.get("date") for node in nodes if node.op == "data"}


def test_evaluations_write_the_day_of_the_step(tmp_path: Path) -> None:
    """Also those of a run that is gone on with, were it begun without them."""
    folder = templates(tmp_path, "file")
    plain, talks = graph(folder, ", holdout: 2"), graph(folder, ", holdout: 2", evaluations=EVALUATED)
    dated = with_dates(talks, TODAY)
    assert dates(talks) == {None} and dates(dated) == {"2026-11-23"}
    assert with_dates(dated, LATER) == dated
    assert keep_dates(dated, talks) == dated
    assert keep_dates(with_dates(plain, TODAY), talks) == dated
