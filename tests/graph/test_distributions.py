"""The distribution of log-probs is part of their type: said once, taken over, compared with its like only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.graph.load import load, load_text
from hflow.graph.types import PLAIN, Distribution, Provenance, ShapedProvenance, Truncation, ValueType
from hflow.graph.write.printer import ir
from hflow.graph.write.yaml_printer import to_yaml

GRPO, TURNS = "tests/bad/parents/grpo.yaml", "tests/bad/parents/turns.yaml"
KEPT = ["nodes.rollout.with.max_kept=32", "nodes.actor_train.in.kept=rollout.kept"]


def distribution(graph: Graph, node: str, port: str = "logprobs") -> Distribution:
    provenance = graph.node(node).type_of(port).provenance
    assert provenance
    return provenance.distribution


def test_a_temperature_is_said_once() -> None:
    graph = load(GRPO, ["nodes.rollout.with.temperature=0.7"])
    assert graph.node("actor_train").options["temperature"] == 0.7
    assert distribution(graph, "rollout") == Distribution(0.7)
    assert str(graph.node("rollout").type_of("logprobs")).endswith("<actor@k behaviour temperature=0.7>")


def test_later_turns_take_over_temperature_and_truncation() -> None:
    graph = load(TURNS, [
        "nodes.rollout.with.temperature=0.7", "nodes.rollout.with.top_k=5", "nodes.rollout.with.max_kept=8",
        "nodes.turn_2.with.max_kept=4", "nodes.turn_2.in.kept=rollout.kept",
        "nodes.actor_train.in.kept=turn_2.kept",
    ])  # fmt: skip
    turn = graph.node("turn_2")
    assert (turn.options["temperature"], turn.options["top_k"]) == (0.7, 5)
    assert distribution(graph, "turn_2") == distribution(graph, "rollout", "kept")
    assert turn.type_of("kept").dims[-1].size == 8, "the sets of the first turn may be larger"
    assert graph.node("actor_train").options["temperature"] == 0.7


def test_a_greedy_sampler_has_no_temperature_to_take_over() -> None:
    graph = load("algorithms/remax.yaml")
    greedy = next(n for n in graph.nodes if n.op == "generate" and n.options["temperature"] == 0)
    readers = [n for n, i in graph.edges() if i.source.node == greedy.name and n.op in ("score", "train")]
    assert all(n.options.get("temperature", 1.0) == 1.0 for n in readers)


@settings(max_examples=25, deadline=None)
@given(
    temperature=st.sampled_from([1.0, 0.7, 0.5]),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.sampled_from([0.5, 0.9, 1.0]),
    min_p=st.none() | st.sampled_from([0.0, 0.1]),
    wired=st.booleans(),
)
def test_only_log_probs_of_one_distribution_meet(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, wired: bool
) -> None:
    """Truncated samples need the kept sets; what truncates nothing needs none, and makes none."""
    limits: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    said = [f"nodes.rollout.with.{name}={value}" for name, value in limits.items() if value is not None]
    truncates = top_k is not None or top_p in (0.5, 0.9) or min_p == 0.1
    if truncates != wired:
        with pytest.raises(HflowError) as refused:
            load(GRPO, [*said, *(KEPT if wired else [])])
        (problem,) = refused.value.diagnostics
        assert problem.code == ("HF212" if wired else "HF229")
        assert wired or ("`kept: rollout.kept`" in problem.help and "`max_kept: 64`" in problem.help)
        return
    graph = load(GRPO, [*said, *(KEPT if wired else [])])
    assert distribution(graph, "rollout") == Distribution(temperature, Truncation.of(limits))
    assert ir(load_text(to_yaml(graph))) == ir(graph)


def test_a_written_temperature_survives_being_written_again() -> None:
    """Of a scorer whose log-probs nobody compares with the samples'."""
    hot = Path(GRPO).read_text().replace("max_new_tokens: 16", "max_new_tokens: 16, temperature: 0.7")
    other = "  other: {op: score, model: actor, in: {tokens: rollout.tokens}, with: {temperature: 1.0}}\n"
    graph = load_text(hot + other)
    assert graph.node("other").options["temperature"] == 1.0
    assert ir(load_text(to_yaml(graph))) == ir(graph)


def test_finish_is_made_where_it_is_read() -> None:
    assert load(GRPO).node("rollout").output("finish") is None
    graph = load(GRPO, ['nodes.rollout.out.finish="i32[batch*group]"'])
    assert str(graph.node("rollout").type_of("finish")) == "i32[batch*group]"


@pytest.mark.parametrize("shape", [PLAIN, Distribution(0.7), Distribution(1.0, Truncation(5, 0.9, 0.1))])
def test_types_survive_plan_files(shape: Distribution) -> None:
    made_by = ShapedProvenance.of("actor", "behaviour", 1, shape)
    adapter = TypeAdapter(ValueType)
    value = ValueType("f32", (), made_by)
    assert adapter.validate_json(adapter.dump_json(value)) == value
    assert (type(made_by) is Provenance) == (shape == PLAIN), "plans without such values are as they were"


def test_a_region_hands_the_sets_out(tmp_path: Path) -> None:
    """And the help names the region's output."""
    text = f"""
hflow: 1
extends: {Path("algorithms/dapo.yaml").absolute()}
name: kept_of_a_region
nodes:
  sampling:
    nodes:
      rollout: {{with: {{top_p: 0.9, max_kept: 32, stop: "</answer>"}}}}
    out: {{kept: rollout.kept}}
  actor_train: {{in: {{kept: sampling.kept}}}}
"""
    (file := tmp_path / "region.yaml").write_text(text)
    graph = load(file)
    assert distribution(graph, "sampling", "kept").truncation == Truncation(top_p=0.9)
    file.write_text(text.replace("in: {kept: sampling.kept}", "with: {}"))
    with pytest.raises(HflowError) as refused:
        load(file)
    assert [d.code for d in refused.value.diagnostics] == ["HF229"]
    assert "`kept: sampling.kept`" in refused.value.diagnostics[0].help
