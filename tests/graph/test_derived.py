"""Numbers made from a critic's values belong to this critic, through any number of calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.builder.builder import GraphBuilder
from hflow.graph.builder.builder_values import NodeHandle
from hflow.graph.ir import Graph
from hflow.graph.load import load, load_text

PARENTS = Path("tests/bad/parents")


def safe_rlhf(*nodes: str) -> Graph:
    changes = "".join(f"  {node}\n" for node in nodes)
    text = f"hflow: 1\nextends: safe_rlhf.yaml\nname: changed\nnodes:\n{changes}"
    return load_text(text, "algorithms/changed.yaml")


def ppo(*nodes: str) -> Graph:
    """PPO with a second critic and its values."""
    changes = "".join(f"  {node}\n" for node in nodes)
    text = (
        "hflow: 1\nextends: ppo.yaml\nname: changed\n"
        "models: {other: {path: models/tiny, head: scalar}}\n"
        f"nodes:\n  others: {{op: score, model: other, in: {{tokens: rollout.tokens}}}}\n{changes}"
    )
    return load_text(text, str(PARENTS / "changed.yaml"))


def types(graph: Graph, node: str) -> dict[str, str]:
    return {o.port: str(o.type) for o in graph.node(node).outputs}


def refused(make: Callable[[], Graph]) -> Diagnostic:
    with pytest.raises(HflowError) as caught:
        make()
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF210" and problem.span
    return problem


def test_what_is_made_from_values_is_the_critics() -> None:
    graph, made = load("algorithms/safe_rlhf.yaml"), "f32[batch, resp~]"
    for node, critic in {"gae": "critic", "cost_gae": "cost_critic"}.items():
        assert types(graph, node) == dict.fromkeys(("advantages", "returns"), f"{made}<{critic}@k derived>")
    assert types(graph, "combined") == {"advantages": made}  # its signature mixes them
    assert types(graph, "advantages") == {"advantages": made}
    assert types(graph, "shaped")["rewards"] == made  # made from scores and log-probs
    assert types(load("algorithms/ppo.yaml"), "advantages") == {"advantages": f"{made}<critic@k derived>"}


@pytest.mark.parametrize(
    ("change", "place", "source", "critic", "other"),
    [
        ("cost_gae: {in: {values: values.values}}", "safe_rlhf", "cost_gae", "cost_critic", "critic"),
        ("cost_gae: {in: {values: cost.values}}", "safe_rlhf", "cost_gae", "cost_critic", "cost"),
        ("cost_critic_train: {in: {returns: gae.returns}}", "changed", "gae", "cost_critic", "critic"),
        ("gae: {in: {values: cost_values.values}}", "ppo", "gae", "critic", "cost_critic"),
        ("critic_train: {in: {returns: cost_gae.returns}}", "changed", "cost_gae", "critic", "cost_critic"),
    ],
)
def test_a_critic_learns_from_its_own_values(
    change: str, place: str, source: str, critic: str, other: str
) -> None:
    problem = refused(lambda: safe_rlhf(change))
    expects = f"`returns` expects numbers made from values of `{critic}`"
    assert problem.message == f"{expects}, but `{source}.returns` was made from values of `{other}`"
    assert problem.span and problem.span.file == f"algorithms/{place}.yaml"
    assert f"wire what was made from those of `{critic}`" in problem.help


def two_critics(read: str, learned: str) -> GraphBuilder:
    """The critics of Safe RLHF: the gae of the second reads values of critic `read`, its loss the returns of
    the gae of `learned`."""
    g = GraphBuilder("two", steps=3)
    actor = g.model("actor", path="models/tiny")
    judge = g.model("judge", path="models/tiny_reward", head="scalar", frozen=True)
    out = {"tokens": "i32[batch, prompt~]"}
    prompts = g.data("prompts", out=out, dataset="d.jsonl", batch=4, prompt="{{ q }}", tokenizer="actor")
    rollout = g.generate("rollout", model=actor, prompt=prompts.tokens, max_new_tokens=8)
    score = g.score("score", model=judge, tokens=rollout.tokens).score
    again = g.score("again", model=actor, tokens=rollout.tokens).logprobs
    shaping = "hflow.ops.shaping.token_rewards"
    shaped = g.call("shaped", shaping, score=score, logprobs=rollout.logprobs, ref_logprobs=again)
    values: dict[str, NodeHandle] = {}
    gaes: dict[str, NodeHandle] = {}
    for critic, source in {"first": "first", "second": read}.items():
        model = g.model(critic, path="models/tiny", head="scalar")
        values[critic] = g.score(f"{critic}_values", model=model, tokens=rollout.tokens)
        seen = values[source].values
        gaes[critic] = g.call(f"{critic}_gae", "hflow.ops.gae.gae", values=seen, rewards=shaped.rewards)
    for critic, source in {"first": "first", "second": learned}.items():
        g.train(
            f"{critic}_train",
            model=critic,
            loss="hflow.ops.values.value_clip",
            tokens=rollout.tokens,
            old_values=values[critic].values,
            returns=gaes[source].returns,
            lr=1e-3,
        )
    return g


def test_the_builder_refuses_them_too() -> None:
    assert two_critics("second", "second").graph().nodes
    for read, learned, source in (("first", "second", "second_gae"), ("second", "first", "first_gae")):
        problem = refused(two_critics(read, learned).graph)
        assert f"of `second`, but `{source}.returns` was made from values of `first`" in problem.message
        assert problem.span and problem.span.file == "tests/graph/test_derived.py"


def halved(source: str, name: str) -> str:
    return f'{name}: {{op: call, fn: "../functions.py:halved", in: {{numbers: {source}}}}}'


def test_it_goes_through_any_number_of_calls() -> None:
    graph = ppo(halved("advantages.returns", "half"), halved("half.half", "quarter"))
    assert types(graph, "quarter") == {
        "half": "f32[batch*group, resp~]<critic@k derived>",
        "keep": "bool[batch*group, resp~]",
        "total": "f32[batch*group]<critic@k derived>",
    }


def test_returns_of_another_critic_are_refused_behind_calls() -> None:
    gae = "gae: {op: call, fn: hflow.ops.gae.gae, in: {values: others.values, rewards: shaped.rewards}}"
    learns = "critic_train: {in: {returns: half.half}}"
    problem = refused(lambda: ppo(gae, halved("gae.returns", "half"), learns))
    assert "values of `critic`, but `half.half` was made from values of `other`" in problem.message


def lower(function: str) -> str:
    return (
        f'lower: {{op: call, fn: "../functions.py:{function}", '
        "in: {first: values.values, second: others.values}}"
    )


def test_a_signature_that_mixes_takes_values_of_several_models() -> None:
    problem = refused(lambda: ppo(lower("lower")))
    assert problem.message.startswith("`first` and `second` must be made from values of one model")
    assert "`<mixed>` at its outputs" in problem.help
    graph = ppo(lower("lower_of_two"), "critic_train: {in: {returns: lower.values}}")
    assert types(graph, "lower") == {"values": "f32[batch*group, resp~]"}


def test_they_are_as_old_as_the_values() -> None:
    lagged = "values: {model: {use: critic, lag: 1}}"
    graph = ppo(lagged, "critic_train: {with: {max_lag: 1}}")
    assert types(graph, "advantages")["returns"] == "f32[batch*group, resp~]<critic@k-1 derived>"


def test_a_loss_that_reads_nothing_else_tells_their_age() -> None:
    loss = '"../functions.py:squared_error"'
    lagged = "values: {model: {use: critic, lag: 1}}"
    train = f"critic_train: {{loss: {loss}, in: {{old_values: null}}}}"
    with pytest.raises(HflowError) as caught:
        ppo(lagged, train)
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF223" and "`advantages.returns` is of `critic` 1 update ago" in problem.message
