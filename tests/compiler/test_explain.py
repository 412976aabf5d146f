"""Each alternative of `explain` against the plan that a pin of that very layout gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from hflow.compiler.compile import compile_graph
from hflow.compiler.explain.alternatives import Alternative, explain
from hflow.compiler.options import DEFAULTS, PlannerOptions
from hflow.diagnostics import HflowError
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan
from tests.compiler.workloads import large

CLUSTER = load_cluster("a100x8")
WITHIN = 0.001  # steps that differ by less are not told apart
QUICK = PlannerOptions(budget_s=3.0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compile_graph(large("ppo", "llama-13b"), CLUSTER)


@pytest.fixture(scope="module")
def explained(plan: Plan) -> Callable[[str], tuple[Alternative, ...]]:
    """What is said of a node of it; of each once."""
    return cache(lambda node: tuple(explain(plan, (), QUICK, node)))


def pin(node: str, alternative: Alternative) -> str:
    """All that the layout says, and what it does not say: axes of size 1, no ZeRO, no recomputation,
    no offload."""
    words = alternative.layout.split()
    for word, axes in (("pp1", "pp"), ("dp1", "dp"), ("tp1", "tp")):
        if not any(w.startswith(axes) for w in words):
            words.append(word)
    if node.endswith("train"):
        words += [] if any(w.startswith("zero") for w in words) else ["zero0"]
        words += [] if "recompute" in words else ["no-recompute"]
        words += [] if "offload" in words else ["no-offload"]
    return f"{node}={','.join(words)}"


@pytest.mark.slow
@pytest.mark.parametrize("node", ["actor_train", "rollout", "reward"])
def test_a_pin_of_an_alternative_takes_as_long(
    plan: Plan, explained: Callable[[str], tuple[Alternative, ...]], node: str
) -> None:
    fitting = [a for a in explained(node) if a.step_time_s is not None]
    assert len(fitting) > 3
    for alternative in fitting[:4]:
        pinned = compile_graph(plan.graph, CLUSTER, [pin(node, alternative)])
        assert alternative.step_time_s and pinned.search.searched_gap == 0
        if "at most" in alternative.reason:  # the time was up
            assert pinned.step_time_s <= alternative.step_time_s * (1 + WITHIN)
            continue
        assert pinned.step_time_s == pytest.approx(alternative.step_time_s, rel=2 * WITHIN)
        assert pinned.node(node).time_s == pytest.approx(alternative.node_time_s, rel=1e-6)


def test_the_chosen_one_is_first_and_others_follow_by_step(
    plan: Plan, explained: Callable[[str], tuple[Alternative, ...]]
) -> None:
    chosen, *others = explained("actor_train")
    assert chosen.step_time_s == plan.step_time_s
    assert chosen.reason == "no other step is shorter"
    steps = [a.step_time_s for a in others if a.step_time_s is not None]
    assert steps == sorted(steps) and steps[0] >= plan.step_time_s * (1 - WITHIN)
    assert all(a.reason == "as fast" or a.reason.startswith("slower by ") for a in others[: len(steps)])
    assert len({(a.layout, a.devices) for a in (chosen, *others)}) == len(others) + 1


def test_what_is_proven_is_told() -> None:
    """Of GRPO the plan is proven to be the best, so that others are slower by just that."""
    graph = large("grpo", "llama-7b")
    chosen, *others = explain(compile_graph(graph, CLUSTER), (), DEFAULTS, "actor_train")
    assert chosen.reason == "no other step is shorter"
    assert others and not any("at most" in a.reason for a in others)


def test_what_does_not_fit_tells_how_much_it_lacks(
    plan: Plan, explained: Callable[[str], tuple[Alternative, ...]]
) -> None:
    """A replica of 13B on each device: 2 bytes for each weight, 4 for its gradient, more for Adam."""
    tight = [a for a in explained("actor_train") if a.step_time_s is None]
    assert tight
    for alternative in tight:
        needs, limit = alternative.reason.removeprefix("does not fit: ").removesuffix(" GB").split(" of ")
        assert float(needs) > float(limit) == 72.0
        with pytest.raises(HflowError, match="HF30[25]"):
            compile_graph(plan.graph, CLUSTER, [pin("actor_train", alternative)])


def test_generation_says_why_it_has_no_pipeline_stages() -> None:
    """Its engine has none, while tp splits the model; of train nodes such layouts are tried."""
    plan = compile_graph(large("grpo", "llama-7b"), CLUSTER)
    *_, last = explain(plan, (), DEFAULTS, "rollout")
    assert (last.layout, last.step_time_s) == ("pp2 and more", None)
    assert last.reason == "not tried: Megatron generates without pipeline stages"
    assert not any("not tried" in a.reason for a in explain(plan, (), DEFAULTS, "actor_train"))


@pytest.mark.slow
def test_a_pinned_node_is_compared_with_what_it_would_have_had(plan: Plan) -> None:
    pins = ("actor_train=pp8,zero0",)
    slower = compile_graph(plan.graph, CLUSTER, pins)
    chosen, best, *_ = explain(slower, pins, QUICK, "actor_train")
    assert chosen.reason == "pinned" and best.reason.endswith("but pinned otherwise")
    assert best.step_time_s == pytest.approx(plan.step_time_s, rel=2 * WITHIN)


def test_other_models_keep_their_placement(plan: Plan) -> None:
    options = PlannerOptions(placement="colocate")
    together = compile_graph(plan.graph, CLUSTER, (), options)
    found = explain(together, (), options, "values")
    assert all(a.step_time_s is None or a.step_time_s >= together.step_time_s * (1 - WITHIN) for a in found)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("actor_trian", "--explain actor_trian: no node `actor_trian`\n = help: did you mean `actor_train`?"),
        ("gae", "--explain gae: `gae` runs where its values lie"),
    ],
)
def test_nothing_to_explain(plan: Plan, node: str, message: str) -> None:
    with pytest.raises(HflowError) as caught:
        explain(plan, (), DEFAULTS, node)
    assert message in str(caught.value) and caught.value.diagnostics[0].code == "HF302"
