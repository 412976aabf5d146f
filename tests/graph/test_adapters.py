"""Models with adapters: which frozen models are their base, and that files and builder say the same."""

from __future__ import annotations

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.adapter import ADAPTER_TARGETS, Adapter
from hflow.graph.builder.builder import GraphBuilder
from hflow.graph.change_meaning import is_harmless, is_possible, meaning
from hflow.graph.ir import Graph, ModelUse
from hflow.graph.keyed_values import keyed_values
from hflow.graph.load import load_text
from hflow.graph.write.printer import ir
from hflow.graph.write.yaml_printer import to_yaml
from hflow.plan.plan import graph_hash
from hflow.view.picture.cards import legend

ADAPTED = ["models.actor.adapter.rank=8"]

F32 = ("models.actor.dtype=f32", "models.ref.dtype=f32")  # what models were that did not say it


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
    ["models.ref.path=models/other", "nodes.prompts.with.tokenizer=ref"],
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


def test_dropout_is_written_and_read() -> None:
    graph = grpo("models.actor.adapter.dropout=0.05")
    assert graph.model("actor").adapter == Adapter(8, 32.0, ADAPTER_TARGETS, 0.05)
    assert "dropout: 0.05" in to_yaml(graph) and load_text(to_yaml(graph)) == graph
    assert "dropout=0.05" in ir(graph)
    g = GraphBuilder("dropped", steps=1)
    g.model("actor", path="models/tiny", adapter_rank=8, adapter_dropout=0.05)
    assert "dropout: 0.05" in g.yaml()


def test_what_drops_nothing_does_not_say_so() -> None:
    """In JSON, so that hashes stay."""
    plain = grpo(*F32)
    assert graph_hash(plain) == graph_hash(grpo(*F32, "models.actor.adapter.dropout=0.0")) == "c6d29f656e03"
    assert graph_hash(grpo("models.actor.adapter.dropout=0.05")) != graph_hash(grpo())


def test_the_base_has_log_probs_of_its_own() -> None:
    """Values of it are not taken for the trained model's: its age is no matter."""
    made_by = (
        grpo("nodes.ref_logprobs.model={use: actor, base: true}").node("ref_logprobs").type_of("logprobs")
    )
    assert made_by.provenance and made_by.provenance.model == "actor's base"


SHARED = [*ADAPTED, "models.critic.adapter={rank: 4, targets: [q_proj]}", "models.critic.base=actor"]


def test_a_shared_base_is_written_and_read() -> None:
    graph = hflow.load("ppo", SHARED)
    assert (graph.model("critic").base, graph.model("critic").base_owner) == ("actor", "actor")
    assert (graph.model("actor").base, graph.model("actor").base_owner) == (None, "actor")
    assert "base: actor" in to_yaml(graph) and load_text(to_yaml(graph)) == graph
    assert "base(actor)" in ir(graph)
    assert any(
        "beside actor's base" in label.content for chip in legend(graph, 600)[0] for label in chip.texts
    )


def test_the_builder_writes_a_shared_base() -> None:
    g = GraphBuilder("shared", steps=1)
    actor = g.model("actor", path="models/tiny", adapter_rank=8)
    g.model("critic", path="models/tiny", head="scalar", adapter_rank=4, base=actor)
    assert "base: actor}" in g.yaml()


@pytest.mark.parametrize("said", ["models.actor.dtype=f32", "models.ref.dtype=f32"])
def test_models_that_share_weights_have_the_dtype_that_is_said_of_one(said: str) -> None:
    graph = grpo(said)
    assert [(model.name, model.dtype) for model in graph.models] == [("actor", "f32")]
    shared = hflow.load("ppo", [*SHARED, said.replace("ref", "critic")])
    dtypes = {model.name: model.dtype for model in shared.models}
    assert dtypes == {"actor": "f32", "critic": "f32", "reward": "auto"}


def test_models_of_two_dtypes_share_no_weights() -> None:
    graph = grpo("models.actor.dtype=f32", "models.ref.dtype=bf16")
    assert [(model.name, model.dtype) for model in graph.models] == [("actor", "f32"), ("ref", "bf16")]


def test_a_run_may_go_on_with_or_without_a_shared_base() -> None:
    old, new = (hflow.load("ppo", [*SHARED, *more]) for more in ([], ["models.critic.base=null"]))
    changes = {key for key, value in keyed_values(old).items() if value != keyed_values(new).get(key)}
    assert changes == {"models.critic.base"}
    assert is_harmless("models.critic.base", old, new)
    assert meaning("models.critic.base", old, new) == "only where frozen weights lie differs"


def test_what_does_not_share_a_base_does_not_say_so() -> None:
    """In JSON, so that hashes stay."""
    said = [*SHARED, *F32, "models.critic.dtype=f32", "models.reward.dtype=f32"]
    without = hflow.load("ppo", [*said, "models.critic.base=null"])
    assert graph_hash(hflow.load("ppo", said)) != graph_hash(without)
    assert graph_hash(without) == "182b001a50e3"  # as before models could say so


@pytest.mark.parametrize(
    ("override", "key", "possible"),
    [
        ("models.actor.adapter.rank=4", "models.actor.adapter.rank", False),
        ("models.actor.adapter.targets=[q_proj]", "models.actor.adapter.targets", False),
        ("models.actor.adapter=null", "models.actor.adapter", False),
        ("models.actor.adapter.alpha=8", "models.actor.adapter.alpha", True),
        ("models.actor.adapter.dropout=0.1", "models.actor.adapter.dropout", True),
    ],
)
def test_a_checkpoint_fits_an_adapter_of_its_own_form(override: str, key: str, possible: bool) -> None:
    old, new = grpo(), grpo(override)
    assert key in keyed_values(old) and keyed_values(old)[key] != keyed_values(new).get(key)
    assert is_possible(key, old, new) is possible
    assert "adapter" in meaning(key, old, new)


@pytest.mark.parametrize(
    ("shape", "has"),
    [("qwen3-30b-a3b", "experts"), ("deepseek-v3", "experts"), ("phi-4", "fused projections")],
)
def test_models_that_no_adapter_fits_are_refused(shape: str, has: str) -> None:
    with pytest.raises(HflowError) as error:
        hflow.compile(grpo(f"params.model=shape:{shape}"), "h100x16")
    assert [d.code for d in error.value.diagnostics] == ["HF230"]
    assert has in error.value.diagnostics[0].message
