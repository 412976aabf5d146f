"""What models with either head say, how old it may be, and what a loss may be over."""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph, Refresh
from hflow.graph.load import load, load_text

PARENTS = Path("tests/bad/parents")


def parent(name: str, *overrides: str) -> Graph:
    return load(PARENTS / f"{name}.yaml", overrides)


def changed(name: str, more: str) -> Graph:
    text = f"hflow: 1\nextends: {name}.yaml\nname: changed\n{more}"
    return load_text(text, str(PARENTS / "changed.yaml"))


def types(graph: Graph, node: str) -> dict[str, str]:
    return {o.port: str(o.type) for o in graph.node(node).outputs}


def test_outputs_of_a_score_node_depend_on_the_head() -> None:
    graph = parent("ppo")
    assert [(m.name, m.head) for m in graph.models] == [("actor", "lm"), ("critic", "scalar"), ("ref", "lm")]
    assert types(graph, "ref_logprobs") == {
        "logprobs": "f32[batch*group, resp~]<ref@k scored>",
        "entropy": "f32[batch*group, resp~]",
    }
    assert types(graph, "values") == {
        "values": "f32[batch*group, resp~]<critic@k value>",
        "score": "f32[batch*group]<critic@k score>",
    }


def test_a_score_enters_where_numbers_do() -> None:
    graph = changed("ppo", "nodes: {shaped: {in: {score: values.score}}, reward: null}\n")
    score = graph.node("shaped").input("score")
    assert score and str(score.type) == "f32[batch*group]<critic@k score>"


def test_a_train_node_computes_what_its_head_can() -> None:
    graph = parent("ppo")
    for node, computed in {"actor_train": ("logprobs", "entropy"), "critic_train": ("values",)}.items():
        function = graph.node(node).function
        assert function and function.trained == computed
        assert not {i.port for i in graph.node(node).inputs} & set(computed)


def test_a_frozen_model_may_take_over_weights() -> None:
    graph = parent("ppo", "models.ref.refresh={from: actor, every: 50}")
    assert graph.model("ref").refresh == Refresh("actor", 50)
    assert graph.model("actor").refresh is None


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_values_are_as_old_as_a_train_node_allows(lag: int, max_lag: int) -> None:
    overrides = (
        f"nodes.rollout.model={{use: actor, lag: {lag}}}",
        f"nodes.actor_train.with.max_lag={max_lag}",
    )
    if lag > max_lag:
        with pytest.raises(HflowError) as caught:
            parent("grpo", *overrides)
        assert [d.code for d in caught.value.diagnostics] == ["HF223"]
        return
    age = f"-{lag}" if lag else ""
    assert types(parent("grpo", *overrides), "rollout")["logprobs"].endswith(f"<actor@k{age} behaviour>")


def test_what_another_model_says_does_not_age() -> None:
    """The texts are the actor's: they may be too old for the actor, and are not for the critic."""
    overrides = ("nodes.rollout.model={use: actor, lag: 1}", "nodes.actor_train.with.max_lag=1")
    assert parent("ppo", *overrides).node("critic_train").options["max_lag"] == 0


def test_a_conversation_is_as_old_as_its_oldest_turn() -> None:
    overrides = ("nodes.rollout.model={use: actor, lag: 2}", "nodes.turn_2.model={use: actor, lag: 1}")
    graph = parent("turns", *overrides, "nodes.actor_train.with.max_lag=2")
    assert types(graph, "turn_2")["logprobs"] == "f32[batch*group, resp~]<actor@k-2 behaviour>"


def test_a_later_turn_appends_to_the_rows_of_the_one_before() -> None:
    graph = parent("turns")
    assert types(graph, "turn_2") == {
        "tokens": "i32[batch*group, seq~]",
        "logprobs": "f32[batch*group, resp~]<actor@k behaviour>",
        "mask": "bool[batch*group, resp~]",
        "text": "str[batch*group]",
    }
    sizes = {o.port: [d.size for d in o.type.dims] for o in graph.node("turn_2").outputs}
    response = 16 + 8 + 16  # first turn, observation, second turn
    assert sizes == {
        "tokens": [32, 512 + response],
        "logprobs": [32, response],
        "mask": [32, response],
        "text": [32],
    }


def test_responses_of_a_list_are_rows_of_their_own() -> None:
    graph = changed("dpo", 'nodes: {pairs: {out: {id: "str[batch]"}}}\n')
    assert types(graph, "pairs") == {
        "tokens": "i32[batch*pair, seq~]",
        "mask": "bool[batch*pair, resp~]",
        "id": "str[batch]",
    }
    assert [o.type.rows for o in graph.node("pairs").outputs] == [16, 16, 8]
    assert [n.rows for n in graph.nodes] == [16, 16, 16]


@pytest.mark.parametrize(
    ("minibatch", "code"), [(2, None), (8, None), (16, None), (1, "HF219"), (6, "HF219")]
)
def test_minibatches_hold_whole_groups(minibatch: int, code: str | None) -> None:
    overrides = (f"nodes.actor_train.repeat.minibatch={minibatch}",)
    if code is None:
        repeat = parent("dpo", *overrides).node("actor_train").repeat
        assert repeat and repeat.minibatch == minibatch
        return
    with pytest.raises(HflowError, match=code):
        parent("dpo", *overrides)


def test_the_order_of_two_trains_of_one_model() -> None:
    more = "nodes: {imitate: {op: train, model: actor, loss: hflow.ops.losses.negative_log_likelihood,"
    graph = changed("grpo", more + " in: {tokens: rollout.tokens}, with: {lr: 1}, after: actor_train}}\n")
    assert [n.name for n in graph.trainers("actor")] == ["actor_train", "imitate"]
    assert graph.node("imitate").after == ("actor_train",)
    assert graph.dag().has_edge("actor_train", "imitate")
