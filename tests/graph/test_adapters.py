"""Models with adapters: which frozen models are their base, and that files and builder say the same."""

from __future__ import annotations

import pytest

import hflow
from hflow.graph.ir import ADAPTER_TARGETS, Adapter, Graph, ModelUse
from hflow.graph.load import load_text
from hflow.graph.write.yaml_printer import to_yaml

ADAPTED = ["models.actor.adapter.rank=8"]


def grpo(*overrides: str) -> Graph:
    return hflow.load("grpo", [*ADAPTED, *overrides])


def test_a_frozen_model_of_the_same_folder_is_the_base() -> None:
    graph = grpo()
    assert [model.name for model in graph.models] == ["actor"]
    assert graph.node("ref_logprobs").model == ModelUse("actor", base=True)
    assert graph.node("rollout").model == graph.node("actor_train").model == ModelUse("actor")
    assert graph.model("actor").adapter == Adapter(8, 32.0, ADAPTER_TARGETS)


@pytest.mark.parametrize(
    "other",
    ["models.ref.path=models/other", "models.ref.dtype=bf16", "nodes.prompts.with.tokenizer=ref"],
)
def test_another_model_is_none(other: str) -> None:
    more = ["nodes.prompts.with.tokenizer=actor"] if "path" in other else []
    graph = grpo(other, *more)
    assert [model.name for model in graph.models] == ["actor", "ref"]
    assert graph.node("ref_logprobs").model == ModelUse("ref")


def test_a_critic_without_an_adapter_shares_nothing() -> None:
    """Of PPO's models the reference alone is the actor's base."""
    graph = hflow.load("ppo", ADAPTED)
    assert [model.name for model in graph.models] == ["actor", "critic", "reward"]


def test_a_written_graph_is_read_as_the_same() -> None:
    graph = grpo("models.actor.adapter.targets=[v_proj, q_proj]")
    adapter = graph.model("actor").adapter
    assert adapter and adapter.targets == ("q_proj", "v_proj")
    text = to_yaml(graph)
    assert "base: true" in text
    assert load_text(text) == graph


def test_the_base_has_log_probs_of_its_own() -> None:
    """Values of it are not taken for the trained model's: its age is no matter."""
    made_by = (
        grpo("nodes.ref_logprobs.model={use: actor, base: true}").node("ref_logprobs").type_of("logprobs")
    )
    assert made_by.provenance and made_by.provenance.model == "actor's base"
