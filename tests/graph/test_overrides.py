from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hflow.diagnostics import Diagnostic, HflowError, render
from hflow.graph.load import check, load, sources
from hflow.graph.source.document import read
from hflow.graph.source.overrides import override

GRPO = Path("algorithms/grpo.yaml")


def refused(*overrides: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(HflowError) as caught:
        load(GRPO, overrides)
    return caught.value.diagnostics


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("params.steps=3", ("params", "steps"), 3),
        ("params.lr=5e-7", ("params", "lr"), 5e-7),
        ("params.model=runs/x=y/model", ("params", "model"), "runs/x=y/model"),
        ("eval.every=10", ("eval", "every"), 10),
        ("seed=7", ("seed",), 7),
        ("models.ref.dtype=bf16", ("models", "ref", "dtype"), "bf16"),
        ("nodes.actor_train.with.betas=[0.9, 0.95]", ("nodes", "actor_train", "with", "betas"), [0.9, 0.95]),
        ("nodes.reward.with={}", ("nodes", "reward", "with"), {}),
        (
            "nodes.rollout.model={use: actor, lag: 1}",
            ("nodes", "rollout", "model"),
            {"use": "actor", "lag": 1},
        ),
    ],
)
def test_values_are_replaced(text: str, path: tuple[str, ...], value: Any) -> None:
    item = override(read(GRPO), [text]).get(path)
    assert item and item.plain() == value


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (
            "nodes.prompts.with.options.operators[0]=-",
            "HF105",
            "`--set` cannot change one item of a list, `operators[0]`",
        ),
        ("nodes.actor_train.with.clip=-1", "HF212", "`clip` must be a finite number >= 0, got -1"),
        ("models.ref.path=''", "HF103", '`path` must be not empty, got ""'),
        (
            "models.actor.adapter={rank: 4, targets: [q_proj, 3]}",
            "HF103",
            "`targets[1]` must be 'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj' or "
            "'down_proj', got 3",
        ),
        # Not also `unknown param` where it is read.
        (
            "params.lr=[1]",
            "HF103",
            "`lr` must be a finite number, a string, true or false, got [1]",
        ),
    ],
)
def test_one_error_says_what_is_wrong(text: str, code: str, message: str) -> None:
    (problem,) = refused(text)
    assert (problem.code, problem.message) == (code, message)


def test_the_rest_of_the_document_stays() -> None:
    before, after = read(GRPO).plain(), override(read(GRPO), ["params.steps=3"]).plain()
    assert after["params"].pop("steps") == 3
    assert before["params"].pop("steps") == 250
    assert after == before


def test_params_reach_every_expression() -> None:
    graph = load(GRPO, ["params.group=4", "params.batch=16", "params.minibatch=32", "params.steps=3"])
    assert graph.steps == 3
    assert graph.node("rollout").rows == 64
    assert graph.params["group"] == 4


def test_a_later_override_wins() -> None:
    assert load(GRPO, ["params.steps=3", "params.steps=4"]).steps == 4


@pytest.mark.parametrize(
    ("text", "help_"),
    [
        ("params.stepz=3", "did you mean `steps`?"),
        ("nodes.rolout.with.n=3", "did you mean `rollout`?"),
        ("models.actor.pth=x", "did you mean `path`?"),
        ("nodes.actor_train.repeat.epoch=2", "did you mean `epochs`?"),
        ("sed=1", "did you mean `seed`?"),
        ("steps=1", "did you mean `params.steps`?"),
        ("nodes.rollout.n=4", "`n` is an option: `nodes.rollout.with.n`"),
        ("params.steps", "write it like `--set params.steps=3`"),
        ("=3", "write it like `--set params.steps=3`"),
        ("params.steps=", "write `null` or `''`"),
        ("params.steps.x=3", ""),
        ("params.steps=[3", ""),
        ("params.steps=*x", ""),
        ("seed=1\nname: x", "write it like `--set params.steps=3`"),
        ("extends=grpo.yaml", ""),
        ("models.ref=null", "write `models: {ref: null}` into a file, and add it with `-f`"),
        ("params.clip=null", "write `params: {clip: null}` into a file, and add it with `-f`"),
        (
            "nodes.prompts.with.prompt={{ question }}=",
            "a template is a string, in quotes: `--set 'nodes.prompts.with.prompt=\"{{ question }}=\"'`",
        ),
    ],
)
def test_bad_overrides(text: str, help_: str) -> None:
    found = refused(text)
    assert [(d.code, d.help) for d in found] == [("HF105", help_)] or help_ == ""
    assert {d.code for d in found} == {"HF105"}
    assert all(d.span and d.span.file == f"--set {text}" for d in found)


def test_what_the_help_for_templates_says_works() -> None:
    graph = load(GRPO, ['nodes.prompts.with.prompt="{{ metadata.expression }}="'])
    assert graph.node("prompts").options["prompt"] == "{{ metadata.expression }}="


def test_all_bad_overrides_are_reported() -> None:
    assert [d.code for d in refused("a=1", "seed=1", "b=2")] == ["HF105", "HF105"]


def test_an_error_in_a_value_points_into_the_override() -> None:
    overrides = ("seed=1", "params.steps=many")
    (problem,) = refused(*overrides)
    # `times` holds an expression, so it is the place of the error, and steps what made it wrong.
    assert (problem.code, problem.span and problem.span.file) == ("HF103", str(GRPO))
    (problem,) = refused("seed=1", "nodes.rollout.with.n=0")
    assert problem.code == "HF212"
    text = render(problem, sources(GRPO, ("seed=1", "nodes.rollout.with.n=0")))
    assert text.splitlines()[1:] == [
        "  --> --set nodes.rollout.with.n=0:1:22",
        "1 | nodes.rollout.with.n=0",
        "  |                      ^",
    ]


def test_sections_are_made_when_the_schema_knows_them() -> None:
    graph, _ = check("algorithms/sft.yaml", ["nodes.actor_train.repeat.minibatch=64"])
    repeat = graph.node("actor_train").repeat
    assert repeat and repeat.minibatch == 64


def test_the_seed_is_what_an_int64_holds() -> None:
    largest = 2**63 - 1
    assert load(GRPO, (f"seed={largest}",)).seed == largest
    for seed in (largest + 1, 99999999999999999999999):
        (diagnostic,) = refused(f"seed={seed}")
        assert diagnostic.code == "HF103"
        assert diagnostic.message.startswith("`seed` must be < 9223372036854775808, got ")


def test_nodes_of_a_region_are_changed_and_not_made() -> None:
    dapo = "algorithms/dapo.yaml"
    changed = load(dapo, ["nodes.sampling.nodes.rollout.with.max_new_tokens=5", "nodes.sampling.times=3"])
    assert changed.node("rollout").options["max_new_tokens"] == 5
    assert changed.region("sampling").times == 3
    for text, help_ in (
        ("nodes.sampling.nodes.rolout.with.n=3", "did you mean `rollout`?"),
        ("nodes.sampling.nodes.rollout.modle=actor", "did you mean `model`?"),
        ("nodes.sampling.until.row=3", "did you mean `rows`?"),
    ):
        with pytest.raises(HflowError) as caught:
            load(dapo, [text])
        assert [(d.code, d.help) for d in caught.value.diagnostics] == [("HF105", help_)]


def test_who_overrides_a_value_need_not_read_its_param(tmp_path: Path) -> None:
    """In GRPO only the paths of the two models read `model`."""
    both = ["models.actor.path=a", "models.ref.path=a"]
    assert check(GRPO, both)[1] == ()
    file = tmp_path / "over.yaml"
    file.write_text("models: {actor: {path: a}, ref: {path: a}}\n")
    assert check(GRPO, files=[file])[1] == ()


def test_a_param_that_no_file_reads_is_told_whatever_is_overridden(tmp_path: Path) -> None:
    file = tmp_path / "over.yaml"
    file.write_text("params: {added: 1}\nmodels: {actor: {path: a}, ref: {path: a}}\n")
    (warning,) = check(GRPO, ["params.added=2"], [file])[1]
    assert (warning.code, warning.message) == ("HF227", "nothing reads the param `added`")
