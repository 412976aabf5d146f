"""What differs between two graphs is all told, at its cause, with what it means for a run that goes on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.changes import ABSENT, Change, changes, check_changes
from hflow.graph.ir import (
    Evaluation,
    Function,
    Graph,
    Input,
    Model,
    ModelUse,
    Node,
    Output,
    Ref,
    Refresh,
    Region,
    Repeat,
)
from hflow.graph.load import load, load_text
from hflow.graph.types import Dim, Factor, Provenance, ValueType
from hflow.graph.write.yaml_printer import to_yaml
from tests.graph.field_mutants import compared_fields, field_mutants

ALGORITHMS = sorted(path.stem for path in Path("algorithms").glob("*.yaml"))
# Together they have all that a graph may hold: critics, a region, a lag, a refresh, a carried scalar.
WALKED = ("ppo", "dapo", "async_grpo", "iterative_grpo", "safe_rlhf")
CLASSES = (
    *(Evaluation, Function, Graph, Input, Model, ModelUse, Node, Output, Ref, Refresh, Region, Repeat),
    *(Dim, Factor, Provenance, ValueType),
)
NOT_TOLD = {(("Graph", "params"),)}  # what they became is
FREEZE, AVERAGE = "nodes.actor_train.with.freeze=embed*", "models.ref.refresh.decay=0.9"
HARMLESS = {
    "name": "name=other",
    "doc": "doc=other",
    "loop.name": "loop.name=round",
    "loop.times": "params.steps=7",
    "eval.every": "eval.every=10",
    "eval.rows": "eval.rows=64",
}


def keys(found: tuple[Change, ...]) -> list[str]:
    return [change.key for change in found]


def changed(algorithm: str, *overrides: str) -> tuple[Change, ...]:
    return changes(load(algorithm), load(algorithm, overrides))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_graph_does_not_differ_from_itself(algorithm: str) -> None:
    """However it was written, and in whatever order of what no random number depends on."""
    graph = load(algorithm)
    assert changes(graph, load_text(to_yaml(graph))) == ()
    drawing = [n for n in graph.nodes if n.op in ("data", "generate")]
    others = [n for n in graph.nodes if n not in drawing]
    nodes = [replace(n, inputs=n.inputs[::-1], after=n.after[::-1]) for n in (*others[::-1], *drawing)]
    assert changes(graph, replace(graph, nodes=tuple(nodes), models=graph.models[::-1], params={})) == ()


@pytest.mark.parametrize("algorithm", [*WALKED[:-1], pytest.param(WALKED[-1], marks=pytest.mark.slow)])
def test_every_field_is_told(algorithm: str) -> None:
    graph = load(algorithm)
    untold = {way for way, mutant in field_mutants(graph) if mutant.regions and not changes(graph, mutant)}
    assert untold == NOT_TOLD


def test_the_walk_meets_every_field() -> None:
    """One that is added to the graph later, too."""
    met = {place for algorithm in WALKED for way, _ in field_mutants(load(algorithm)) for place in way}
    assert met >= compared_fields(*CLASSES)


def test_algorithms_differ_from_each_other() -> None:
    graphs = [load(algorithm) for algorithm in ALGORITHMS]
    for old, new in product(graphs, graphs):
        found = changes(old, new)
        assert bool(found) == (old is not new)
        assert len(keys(found)) == len(set(keys(found))) and all(c.meaning for c in found)
        assert all(c.possible or not c.harmless for c in found)


@pytest.mark.parametrize(
    ("algorithm", "override", "told"),
    [
        ("grpo", "params.lr=2e-4", ["nodes.actor_train.with.lr"]),
        ("grpo", "params.batch=64", ["nodes.prompts.with.batch"]),  # the types of nine values follow
        ("grpo", "params.model=other", ["models.actor.path", "models.ref.path"]),
        ("grpo", "params.holdout=64", ["eval.rows", "nodes.prompts.with.holdout"]),
        ("grpo", "seed=1", ["seed"]),
        ("grpo", "nodes.prompts.with.options.max_terms=3", ["nodes.prompts.with.options.max_terms"]),
        ("grpo", "nodes.actor_train.repeat.epochs=2", ["nodes.actor_train.repeat.epochs"]),
        ("gspo", "nodes.actor_train.loss=hflow.ops.losses.cispo", ["nodes.actor_train.loss"]),
        ("dapo", "params.group=4", ["nodes.rollout.with.n"]),
        ("dapo", "nodes.sampling.short=fail", ["nodes.sampling.short"]),
        ("iterative_grpo", "models.ref.refresh.every=7", ["models.ref.refresh.every"]),
        (
            "safe_rlhf",
            "nodes.multiplier.in.log_multiplier.init=1",
            ["nodes.multiplier.in.log_multiplier.init"],
        ),
    ],
)
def test_told_at_its_cause(algorithm: str, override: str, told: list[str]) -> None:
    assert keys(changed(algorithm, override)) == told


def test_values_are_told_as_files_write_them() -> None:
    (lr,) = changed("grpo", "params.lr=2e-4")
    assert (lr.before, lr.after) == ("0.0001", "0.0002")
    assert lr.meaning.startswith("updates from here on are made with another `lr`")
    (betas,) = changed("grpo", "nodes.actor_train.with.betas=[0.9, 0.95]")
    assert (betas.before, betas.after) == ("[0.9, 0.999]", "[0.9, 0.95]")


def test_the_age_of_weights_is_told_once() -> None:
    """Types of log-probs say it too."""
    found = changed("async_grpo", "nodes.rollout.model=actor", "nodes.actor_train.with.max_lag=0")
    assert keys(found) == ["nodes.rollout.model.lag", "nodes.actor_train.with.max_lag"]
    assert [c.harmless for c in found] == [False, True]


def test_what_came_and_went_is_told_as_a_whole() -> None:
    found = {c.key: c for c in changes(load("ppo"), load("grpo"))}
    assert found["nodes.critic_train"].after == ABSENT and found["models.critic"].possible
    assert found["nodes.actor_train.in.ref_logprobs"].before == ABSENT
    assert not [key for key in found if key.startswith(("nodes.critic_train.", "models.critic."))]


def test_a_node_that_draws_in_another_place_draws_others() -> None:
    graph = load("tool_grpo")
    rollouts = [n for n in graph.nodes if n.op == "generate"]
    others = tuple(n for n in graph.nodes if n.op != "generate")
    found = changes(graph, replace(graph, nodes=(*others, *rollouts[1:], rollouts[0])))
    assert set(keys(found)) == {f"nodes.{n.name}.place" for n in rollouts}
    assert not any(c.harmless for c in found)


@pytest.mark.parametrize(("key", "override"), HARMLESS.items())
def test_harmless(key: str, override: str) -> None:
    (found,) = changed("grpo", override)
    assert found.key == key and found.harmless
    assert check_changes(load("grpo"), load("grpo", (override,))) == (found,)


def test_without_evaluation_nothing_else_differs() -> None:
    graph = load("grpo")
    (found,) = changes(graph, replace(graph, evaluation=None))
    assert found.key == "eval" and found.harmless


def test_a_bound_on_rounds_is_harmless_where_too_few_end_the_run() -> None:
    assert not any(c.harmless for c in changed("dapo", "nodes.sampling.times=20"))
    base = ("nodes.sampling.short=fail",)
    (found,) = changes(load("dapo", base), load("dapo", (*base, "nodes.sampling.times=20")))
    assert found.key == "nodes.sampling.times" and found.harmless


def test_which_weights_travel_is_harmless() -> None:
    (found,) = changed("async_grpo", "nodes.rollout.model.delta_weights=0.02")
    assert (found.key, found.harmless) == ("nodes.rollout.model.delta_weights", True)


def test_what_is_computed_from_the_number_of_steps_is_told() -> None:
    warmup = "nodes.actor_train.with.warmup_steps=${ steps // 5 }"
    found = changes(load("grpo", (warmup,)), load("grpo", (warmup, "params.steps=50")))
    assert [(c.key, c.before, c.after, c.harmless) for c in found] == [
        ("loop.times", "250", "50", True),
        ("nodes.actor_train.with.warmup_steps", "50", "10", False),
    ]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_more_steps_name_the_schedule_that_shifts(schedule: str) -> None:
    option = "nodes.actor_train.with"
    given = (f"{option}.schedule={schedule}", *([f"{option}.decay_steps=5"] if schedule == "wsd" else []))
    (found,) = changes(load("grpo", given), load("grpo", (*given, "params.steps=500")))
    assert found.key == "loop.times" and not found.harmless and found.possible
    assert f"`schedule: {schedule}` of `actor_train`" in found.meaning
    with pytest.raises(HflowError, match="--allow loop.times"):
        check_changes(load("grpo", given), load("grpo", (*given, "params.steps=500")))
    assert check_changes(load("grpo", given), load("grpo", (*given, "params.steps=500")), ["loop.times"])


def test_more_steps_do_not_shift_a_constant_rate() -> None:
    given = ("nodes.actor_train.with.schedule=constant",)
    (found,) = changes(load("grpo", given), load("grpo", (*given, "params.steps=500")))
    assert found.key == "loop.times" and found.harmless


@pytest.mark.parametrize(
    ("old", "new", "impossible"),
    [
        (("grpo",), ("ppo",), ["models.critic", "nodes.critic_train"]),  # never trained before
        (("grpo",), ("grpo", "models.actor.dtype=bf16"), ["models.actor.dtype"]),
        (("iterative_grpo",), ("iterative_grpo", "models.ref.dtype=bf16"), ["models.ref.dtype"]),
        (("grpo",), ("grpo", "models.ref.dtype=bf16"), []),
        (("grpo",), ("grpo", FREEZE), ["nodes.actor_train.with.freeze"]),
        (("grpo", FREEZE), ("grpo",), ["nodes.actor_train.with.freeze"]),
        (("iterative_grpo",), ("iterative_grpo", AVERAGE), ["models.ref.refresh.decay"]),
        (("iterative_grpo", AVERAGE), ("iterative_grpo",), ["models.ref.refresh.decay"]),
        (("iterative_grpo", AVERAGE), ("iterative_grpo", "models.ref.refresh.decay=0.5"), []),
        (("iterative_grpo", AVERAGE), ("grpo",), []),
        (("grpo",), ("iterative_grpo", AVERAGE), ["models.ref.refresh"]),
        (("ppo",), ("grpo",), []),  # the critic goes
        (("grpo",), ("async_grpo",), []),
        (("iterative_grpo",), ("grpo",), []),
    ],
    ids=str,
)
def test_impossible(old: tuple[str, ...], new: tuple[str, ...], impossible: list[str]) -> None:
    found = changes(load(old[0], old[1:]), load(new[0], new[1:]))
    assert sorted(c.key for c in found if not c.possible) == impossible
    assert {"HF411"} == {d.code for d in refused(old, new, *keys(found))} if impossible else True


def test_a_trained_model_keeps_its_head() -> None:
    graph = load("ppo")
    other = tuple(replace(m, head="lm") if m.head == "scalar" else m for m in graph.models)
    found = {c.key: c.possible for c in changes(graph, replace(graph, models=other))}
    assert found == {"models.critic.head": False, "models.reward.head": True}


def test_a_model_that_nothing_trains_any_more() -> None:
    graph = load("ppo")
    nodes = tuple(n for n in graph.nodes if n.name != "critic_train")
    (found,) = changes(graph, replace(graph, nodes=nodes))
    assert found.key == "nodes.critic_train" and not found.possible
    models = tuple(m for m in graph.models if m.name != "critic")
    read = tuple(n for n in nodes if not n.model or n.model.model != "critic")
    assert all(c.possible for c in changes(graph, replace(graph, nodes=read, models=models)))


def test_rows_that_wait_must_fit() -> None:
    waits = ("nodes.sampling.until.max_age=1", "nodes.actor_train.with.max_lag=1")
    old = load("dapo", waits)
    assert keys(changes(load("dapo"), old)) == [override.partition("=")[0] for override in waits]
    found = changes(old, load("dapo", (*waits, "params.group=4")))
    assert [c.key for c in found if c.possible] == ["nodes.rollout.with.n"]
    assert {c.key for c in found if not c.possible} == {
        f"nodes.sampling.out.{o.port}.type" for o in old.node("sampling").outputs if "group" in str(o.type)
    }
    longer = changes(old, load("dapo", (*waits, "params.max_new_tokens=9")))
    assert keys(longer)[0] == "nodes.rollout.with.max_new_tokens" and all(c.possible for c in longer)


def refused(old: tuple[str, ...], new: tuple[str, ...], *allowed: str) -> tuple:
    with pytest.raises(HflowError) as caught:
        check_changes(load(old[0], old[1:]), load(new[0], new[1:]), allowed)
    return caught.value.diagnostics


def test_every_other_change_is_refused() -> None:
    lr, kl = refused(("grpo",), ("grpo", "params.lr=2e-4", "params.kl_coef=0", "params.steps=9"))
    assert lr.code == kl.code == "HF411"
    assert lr.message.startswith(
        "`nodes.actor_train.with.lr` was 0.0001, and is 0.0002: updates from here on"
    )
    assert lr.help == "`--allow nodes.actor_train.with.lr` goes on with it"


def test_what_is_allowed_is_accepted() -> None:
    old = load("grpo")
    new = load("grpo", ("params.lr=2e-4", "params.kl_coef=0", "params.steps=9"))
    told = ["loop.times", "nodes.actor_train.with.lr", "nodes.actor_train.with.kl_coef"]
    assert sorted(keys(check_changes(old, new, told[1:]))) == sorted(told)
    assert sorted(keys(check_changes(old, new, ["nodes.actor_train"]))) == sorted(told)
    assert sorted(keys(check_changes(old, new, ["nodes", "loop"]))) == sorted(told)
    (kl,) = refused(("grpo",), ("grpo", "params.lr=2e-4", "params.kl_coef=0"), "nodes.actor_train.with.lr")
    assert "kl_coef" in kl.message


def test_a_key_that_allows_nothing() -> None:
    found = refused(("grpo",), ("grpo", "params.lr=2e-4"), "nodes.actor_train.with.lr", "nodes.actor")
    assert [d.message for d in found] == [
        "`--allow nodes.actor`: nothing differs from the checkpoint's graph there"
    ]
    near = refused(("grpo",), ("grpo", "params.lr=2e-4"), "nodes.actor_trian.with.lr")
    assert near[1].help == "did you mean `nodes.actor_train.with.lr`?"


def test_what_is_impossible_cannot_be_allowed() -> None:
    found = refused(("grpo",), ("grpo", "models.actor.dtype=bf16"), "models")
    assert all("--allow" not in d.help for d in found) and found
