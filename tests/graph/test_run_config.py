"""The section `run`: what it says, how its layers merge, and that graphs and plans know nothing of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hflow
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.load import assembled, check, checked, load, load_text, read_graph, run_config
from hflow.graph.run_config import (
    CheckpointPolicy,
    HangPolicy,
    ReplanPolicy,
    RunConfig,
    SamplePolicy,
    TrackerName,
)
from hflow.graph.run_file import check_run_config, overridden, read_run_config, run_config_text
from hflow.graph.source.document import parse
from hflow.graph.source.extends import overlay
from hflow.graph.write.formatter import format_text
from hflow.graph.write.resolved import resolved
from hflow.graph.write.yaml_printer import to_yaml

GRPO = Path("algorithms/grpo.yaml")
TEXT = GRPO.read_text()
NODES = TEXT.index("nodes:\n")
ALL = """\
run:
  checkpoint: {every: 10, seconds: 600, keep: 3, best: reward_mean, mode: min, on_signal: false}
  export: best
  restarts: 3
  grace: 1.5
  retry: [HF401]
  elastic: true
  wait: 90
  hang: {factor: 5, least: 60, first: 600.5}
  samples: {every: 5, rows: 64, keep_mb: 0.5}
  trackers: [wandb, tensorboard]
  replan: {every: 20, moved: 0.5, gain: 3}
  show: [actor_train.kl, rollout.response_length]
"""
ALL_CONFIG = RunConfig(
    CheckpointPolicy(10, 600.0, 3, "reward_mean", "min", False),
    "best",
    3,
    1.5,
    ("HF401",),
    True,
    90,
    HangPolicy(5.0, 60.0, 600.5),
    SamplePolicy(5, 64, 0.5),
    ("wandb", "tensorboard"),
    ReplanPolicy(20, 0.5, 3.0),
    ("actor_train.kl", "rollout.response_length"),
)
CHECKPOINT = CheckpointPolicy(10, 600.0, 3, "reward_mean", "min", False)
OFF = CheckpointPolicy(on_signal=False)


def said(text: str, *overrides: str, files: Sequence[Path] = ()) -> RunConfig:
    """What a partial text and overrides come to, over grpo."""
    document = read_graph(GRPO)
    over = overlay(document, [parse(text, "over.yaml")]) if text else document
    return checked(over, overrides, files).config


def refused(*overrides: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(HflowError) as caught:
        load(GRPO, overrides)
    return caught.value.diagnostics


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", RunConfig()),
        ("run: {}", RunConfig()),
        (ALL, ALL_CONFIG),
        ("run: {samples: 7}", RunConfig(samples=SamplePolicy(every=7))),
        ("run: {samples: false}", RunConfig(samples=SamplePolicy(every=0))),
        ("run: {trackers: mlflow}", RunConfig(trackers=("mlflow",))),
        ("run: {trackers: [wandb, mlflow, wandb]}", RunConfig(trackers=("wandb", "mlflow"))),
        ("run: {show: time_s.rollout}", RunConfig(show=("time_s.rollout",))),
        (
            "run: {show: [digest.rollout, reward_mean, digest.rollout]}",
            RunConfig(show=("digest.rollout", "reward_mean")),
        ),
        ("run: {checkpoint: 10}", RunConfig(CheckpointPolicy(every=10))),
        ("run: {checkpoint: '${ steps // 25 }'}", RunConfig(CheckpointPolicy(every=10))),
        ("run: {checkpoint: {seconds: '${ group * 60 }'}}", RunConfig(CheckpointPolicy(seconds=480))),
        ("run: {checkpoint: false}", RunConfig(OFF)),
        ("run: {restarts: 1, retry: HF401}", RunConfig(restarts=1, retry=("HF401",))),
        ("run: {export: none, restarts: 2, grace: 0}", RunConfig(export="none", restarts=2, grace_s=0)),
        ("run: {hang: {first: '${ steps * 60 }'}}", RunConfig(hang=HangPolicy(first_s=15000))),
        ("run: {hang: false}", RunConfig(hang=HangPolicy(factor=0))),
        ("run: {hang: {}}", RunConfig()),
        ("run: {replan: true}", RunConfig(replan=ReplanPolicy(10))),
        ("run: {replan: {}}", RunConfig(replan=ReplanPolicy(10))),
        ("run: {replan: false}", RunConfig()),
        ("run: {replan: 5}", RunConfig(replan=ReplanPolicy(5))),
        ("run: {replan: {gain: 0, moved: '${ lr }'}}", RunConfig(replan=ReplanPolicy(10, 1e-4, 0.0))),
    ],
)
def test_what_the_section_says(text: str, config: RunConfig) -> None:
    assert said(text) == config


@pytest.mark.parametrize(
    ("text", "overrides", "policy"),
    [
        ("", ["run.checkpoint.every=10"], CheckpointPolicy(10)),
        (ALL, ["run.checkpoint.every=20"], CheckpointPolicy(20, 600, 3, "reward_mean", "min", False)),
        ("run: {checkpoint: 10}", ["run.checkpoint.keep=5"], CheckpointPolicy(10, keep=5)),
        ("run: {checkpoint: false}", ["run.checkpoint.every=5"], CheckpointPolicy(5)),
        ("run: {checkpoint: {every: 5, keep: 4}}", ["run.checkpoint=10"], CheckpointPolicy(10)),
        ("run: {checkpoint: {every: 5, keep: 4}}", ["run.checkpoint=false"], OFF),
    ],
)
def test_set_comes_last(text: str, overrides: list[str], policy: CheckpointPolicy) -> None:
    assert said(text, *overrides).checkpoint == policy


@pytest.mark.parametrize(
    ("text", "override", "policy"),
    [
        ("run: {replan: true}", "run.replan.every=5", ReplanPolicy(5)),
        ("run: {replan: true}", "run.replan=false", ReplanPolicy()),
        ("run: {replan: 5}", "run.replan.gain=4", ReplanPolicy(5, gain=4)),
        ("run: {replan: {every: 5, moved: 1}}", "run.replan.every=7", ReplanPolicy(7, 1)),
        ("run: {replan: {every: 5, moved: 1}}", "run.replan=true", ReplanPolicy(10)),
        ("", "run.replan.moved=0.5", ReplanPolicy(10, 0.5)),
    ],
)
def test_short_forms_of_replan_are_changed_as_what_they_stand_for(
    text: str, override: str, policy: ReplanPolicy
) -> None:
    assert said(text, override).replan == policy


@pytest.mark.parametrize(
    ("below", "above", "policy"),
    [
        ("{every: 5, keep: 4}", "10", CheckpointPolicy(10, keep=4)),
        ("5", "{keep: 4}", CheckpointPolicy(5, keep=4)),
        ("5", "10", CheckpointPolicy(10)),
        ("false", "{every: 10}", CheckpointPolicy(10)),
        ("false", "10", CheckpointPolicy(10)),
        ("{every: 5, keep: 4}", "false", OFF),
        ("{every: 5, keep: 4}", "{keep: null}", CheckpointPolicy(5)),
    ],
)
def test_a_child_is_merged_over_its_parent(
    tmp_path: Path, below: str, above: str, policy: CheckpointPolicy
) -> None:
    (tmp_path / "parent.yaml").write_text(TEXT + f"run: {{checkpoint: {below}, restarts: 7}}\n")
    child = tmp_path / "child.yaml"
    child.write_text(f"hflow: 1\nextends: parent.yaml\nname: child\nrun: {{checkpoint: {above}}}\n")
    assert run_config(child) == RunConfig(policy, restarts=7)
    over = tmp_path / "over.yaml"
    over.write_text("run: {restarts: 8, grace: 5}\n")
    assert run_config(child, ["run.grace=6"], [over]) == RunConfig(policy, restarts=8, grace_s=6)


@pytest.mark.parametrize(
    ("below", "above", "policy"),
    [
        ("{factor: 5, least: 60}", "{least: 70}", HangPolicy(5, 70)),
        ("{factor: 5, least: 60}", "false", HangPolicy(0)),
        ("false", "{least: 60}", HangPolicy(least_s=60)),
    ],
)
def test_deadlines_are_merged_too(tmp_path: Path, below: str, above: str, policy: HangPolicy) -> None:
    (tmp_path / "parent.yaml").write_text(TEXT + f"run: {{hang: {below}}}\n")
    child = tmp_path / "child.yaml"
    child.write_text(f"hflow: 1\nextends: parent.yaml\nname: child\nrun: {{hang: {above}}}\n")
    assert run_config(child).hang == policy
    first = run_config(child, ["run.hang.first=7"]).hang
    assert first == (HangPolicy(first_s=7) if above == "false" else replace(policy, first_s=7))
    assert run_config(child, ["run.hang=false"]).hang == HangPolicy(0)


def test_each_value_tells_its_origin() -> None:
    text = resolved(assembled(parse(TEXT + ALL, "grpo.yaml"), ["run.checkpoint.every=${ steps // 5 }"]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    number = len(TEXT.splitlines()) + 2
    origin = "--set run.checkpoint.every=${ steps // 5 } (${ steps // 5 })"
    assert f"every: 50 # {origin}" in lines and f"seconds: 600 # grpo.yaml:{number}" in lines


@pytest.mark.parametrize(
    ("overrides", "code", "place", "help_"),
    [
        (["run.chekpoint=3"], "HF105", (1, 1), "did you mean `checkpoint`?"),
        (["run.checkpoint.evry=3"], "HF105", (1, 1), "did you mean `every`?"),
        (["run.checkpoint={evry: 3}"], "HF102", (1, 17), "did you mean `every`?"),
        (["run.checkpoint=-1"], "HF103", (1, 16), ""),
        (["run.checkpoint=true"], "HF103", (1, 16), ""),
        (["run.grace=.inf"], "HF103", (1, 11), ""),
        (["run.hang=3"], "HF103", (1, 10), ""),
        (["run.hang=true"], "HF103", (1, 10), ""),
        (["run.hang.factor=-1"], "HF103", (1, 17), ""),
        (["run.hang={lest: 3}"], "HF102", (1, 11), "did you mean `least`?"),
        (["run.export=best"], "HF228", (1, 12), "name one: `checkpoint: {every: 10, best: reward_mean}`"),
        (["run.checkpoint={every: 1, best: loss.foo}"], "HF228", (1, 33), None),
        (["run.checkpoint={every: 1, best: reward_meen}"], "HF228", (1, 33), "did you mean `reward_mean`?"),
        (
            ["run.checkpoint={every: 1, best: rewards.score}"],
            "HF228",
            (1, 33),
            "did you mean `reward.score`?",
        ),
        (["run.checkpoint={every: 1, best: digest.rollout}"], "HF228", (1, 33), None),
        (["run.checkpoint={every: 1, best: time_s.foo}"], "HF228", (1, 33), None),
        (["run.checkpoint={every: 1, best: reward/score}"], "HF103", (1, 33), ""),
        (["run.show=[reward_mean, loss.foo]"], "HF228", (1, 24), None),
        (["run.show=reward_meen"], "HF228", (1, 10), "did you mean `reward_mean`?"),
        (["run.show=[digest.foo]"], "HF228", (1, 11), None),
        (["run.show=['']"], "HF103", (1, 11), ""),
        (["run.show=eval/test/score"], "HF103", (1, 10), ""),
    ],
)
def test_mistakes(overrides: list[str], code: str, place: tuple[int, int], help_: str | None) -> None:
    (problem,) = refused(*overrides)
    assert problem.code == code
    assert problem.span and (problem.span.line, problem.span.column) == place
    assert help_ is None or problem.help == help_


def test_a_bad_section_does_not_hide_what_else_is_wrong() -> None:
    found = refused("run.checkpoint.best=loss.foo", "nodes.rollout.model=actr")
    assert {"HF228", "HF202"} <= {problem.code for problem in found}


@pytest.mark.parametrize(
    "best",
    ["reward_mean", "tokens_per_s", "time_s", "loss.actor_train", "actor_train.kl", "reward.score",
     "time_s.rollout", "rollout.whatever", "ref_logprobs.entropy"],
)  # fmt: skip
def test_what_may_be_a_metric_is_accepted(best: str) -> None:
    graph, warnings = check(GRPO, ["run.checkpoint.every=1", f"run.checkpoint.best={best}", "eval.every=1"])
    assert warnings == () and graph.nodes


@pytest.mark.parametrize(
    ("overrides", "key"),
    [(["run.checkpoint.best=reward_mean"], "best"), (["run.checkpoint.mode=min"], "mode")],
)
def test_what_has_no_effect_is_a_warning(overrides: list[str], key: str) -> None:
    (warning,) = check(GRPO, overrides)[1]
    assert (warning.code, warning.severity) == ("HF228", "warning") and f"`{key}" in warning.message


def test_a_param_that_only_the_section_reads_is_read() -> None:
    text = TEXT.replace("params:\n", "params:\n  often: 5\n") + 'run: {checkpoint: "${ often }"}\n'
    found = checked(parse(text, str(GRPO)))
    assert found.warnings == () and found.config.checkpoint.every == 5


# ---------- a graph and its plan know nothing of it


@pytest.mark.parametrize(
    "text",
    [
        TEXT + "\n" + ALL,
        TEXT[:NODES] + ALL + "\n" + TEXT[NODES:],
        TEXT[:NODES] + "# kept so\n" + ALL + "\n" + TEXT[NODES:],
        TEXT[:NODES] + "run: {checkpoint: {every: 5,\n    keep: 4\n}}\n" + TEXT[NODES:],
    ],
)
def test_the_graphs_text_is_the_files_without_the_section(text: str) -> None:
    found = checked(parse(text, str(GRPO)))
    assert found.config != RunConfig()
    assert found.graph == load(GRPO) and found.graph.text == TEXT


def test_what_stands_around_the_section_stays() -> None:
    text = "# head\nrun: 10\n" + TEXT + "# end\n"
    assert load_text(text.replace("run: 10", "run: {checkpoint: 10}"), str(GRPO)).text == (
        "# head\n" + TEXT + "# end\n"
    )


def test_a_file_in_brackets_loses_its_section_too() -> None:
    braced = resolved(assembled(parse(TEXT, str(GRPO))))
    plain: Any = parse(braced, "x").plain()
    graph = load_text(json.dumps({**plain, "run": {"checkpoint": 3}}), str(GRPO))
    assert "run" not in parse(graph.text, "x").plain() and load_text(graph.text, str(GRPO)) == graph


def test_overrides_of_the_section_are_no_part_of_the_graphs_text(tmp_path: Path) -> None:
    over = tmp_path / "over.yaml"
    over.write_text("run: {restarts: 8}\n")
    kept = load(GRPO, ["run.checkpoint=10"], [over])
    assert kept.text == TEXT
    both = load(GRPO, ["run.checkpoint=10", "params.steps=3"], [over])
    assert both == load(GRPO, ["params.steps=3"]) and both.text == load(GRPO, ["params.steps=3"]).text
    assert "run" not in parse(to_yaml(both), "x").plain()


def test_the_plan_does_not_depend_on_it() -> None:
    bare = ["params.model=shape:llama-7b"]
    kept = [*bare, "run.checkpoint={every: 10, best: reward_mean}", "run.export=best"]
    plans = [hflow.compile(load(GRPO, overrides), "clusters/a100x8.yaml") for overrides in (bare, kept)]
    assert plans[0].hash == plans[1].hash and plans[0] == plans[1]


# ---------- run.yaml

SECONDS = st.floats(0, 1e9) | st.integers(0, 10**9).map(float)
NATURALS = st.integers(0, 2**63 - 1)
METRICS = st.just("") | st.from_regex(
    r"[a-z_][a-z0-9_]{0,60}(\.[A-Za-z_][A-Za-z0-9_]{0,60})?", fullmatch=True
)
POLICIES = st.builds(
    CheckpointPolicy,
    NATURALS, SECONDS, st.integers(1, 2**63 - 1), METRICS, st.sampled_from(["max", "min"]), st.booleans(),
)  # fmt: skip
HANGS = st.builds(HangPolicy, SECONDS, SECONDS, SECONDS)
CODES = st.lists(st.from_regex(r"HF4[0-9]{2}", fullmatch=True), max_size=3).map(tuple)
CONFIGS = st.builds(
    RunConfig,
    POLICIES,
    st.sampled_from(["last", "best", "none"]),
    NATURALS,
    SECONDS,
    CODES,
    st.booleans(),
    SECONDS,
    HANGS,
    st.builds(SamplePolicy, NATURALS, st.integers(1, 2**63 - 1), st.floats(0, 1e9, exclude_min=True)),
    st.lists(st.sampled_from(get_args(TrackerName)), unique=True).map(tuple),
    st.builds(ReplanPolicy, NATURALS, SECONDS, SECONDS),
    st.lists(METRICS.filter(bool), max_size=3, unique=True).map(tuple),
)


@given(CONFIGS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> None:
    path = tmp_path_factory.getbasetemp() / "run.yaml"
    path.write_text(run_config_text(config))
    assert read_run_config(path) == config
    assert format_text(path.read_text()) == path.read_text()


def test_the_file_has_every_key() -> None:
    assert run_config_text(RunConfig()) == (
        "run:\n"
        '  checkpoint: {every: 0, seconds: 0, keep: 2, best: "", mode: max, on_signal: true}\n'
        "  export: last\n  restarts: 0\n  grace: 30\n  retry: []\n  elastic: false\n  wait: 60\n"
        "  hang: {factor: 10, least: 300, first: 14400}\n"
        "  samples: {every: 10, rows: 1024, keep_mb: 100}\n"
        "  trackers: []\n"
        "  replan: {every: 0, moved: 0.2, gain: 2}\n"
        "  show: []\n"
    )
    assert run_config_text(ALL_CONFIG) == ALL


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("", "HF002", None),
        ("run:\n  checkpoint: {every: 1\n", "HF002", (3, 1)),
        ("run:\n  checkpoint: {every: x}\n", "HF103", (2, 23)),
        ("run:\n  checkpoint: {every: '${ x }'}\n", "HF103", (2, 23)),
        ("- run\n", "HF103", (1, 1)),
        ("checkpoint: 10\n", "HF101", None),
        ("run: {}\nrun: {}\n", "HF003", (2, 1)),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, text: str, code: str, place: tuple[int, int] | None
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(HflowError) as caught:
        read_run_config(path)
    problem = caught.value.diagnostics[0]
    assert problem.code == code
    if place:
        assert problem.span and problem.span.file == str(path)
        assert (problem.span.line, problem.span.column) == place


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HflowError, match="HF001"):
        read_run_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (RunConfig(CheckpointPolicy(every=-1)), "HF103"),
        (RunConfig(CheckpointPolicy(best="loss.foo")), "HF228"),
        (RunConfig(export="best"), "HF228"),
        (RunConfig(grace_s=float("nan")), "HF103"),
        (RunConfig(hang=HangPolicy(least_s=-1)), "HF103"),
        (RunConfig(restarts="x"), "HF103"),  # type: ignore[arg-type]
        (RunConfig(retry=("HF401",)), "HF228"),
        (RunConfig(elastic=True), "HF228"),
        (RunConfig(restarts=1, retry=("HF499",)), "HF228"),
        (RunConfig(restarts=1, retry=("HF101",)), "HF103"),
    ],
)
def test_python_is_refused_what_a_file_is(config: RunConfig, code: str) -> None:
    with pytest.raises(HflowError) as caught:
        check_run_config(config, load(GRPO))
    assert [(d.code, d.span) for d in caught.value.diagnostics] == [(code, None)]


def test_what_is_written_may_be_changed(tmp_path: Path) -> None:
    over = tmp_path / "over.yaml"
    over.write_text('run: {checkpoint: {every: "${ steps // 10 }", best: null}, export: last}\n')
    written = ALL_CONFIG
    config, warnings = overridden(written, load(GRPO), ["run.checkpoint.mode=max"], [over])
    changed = CheckpointPolicy(25, 600, 3, "", "max", False)
    assert config == replace(ALL_CONFIG, checkpoint=changed, export="last")
    assert warnings == ()
    with pytest.raises(HflowError, match="HF228.*`foo`"):
        overridden(written, load(GRPO), ["run.checkpoint.best=loss.foo"])
    with pytest.raises(HflowError, match="HF104.*unknown param `stps`"):
        overridden(written, load(GRPO), ["run.checkpoint=${ stps }"])


# ---------- form


def test_the_formatter_knows_the_section() -> None:
    text = (
        "nodes: {}\nrun:\n    grace: 5\n    checkpoint: {on_signal: True, best: 'reward_mean', every: 10}\n"
        "name: x\neval: {}\n"
    )
    expected = (
        "name: x\n\neval: {}\n\n"
        "run:\n  checkpoint: {every: 10, best: reward_mean, on_signal: true}\n  grace: 5\n\nnodes: {}\n"
    )
    assert format_text(text) == expected and format_text(expected) == expected


def test_a_best_that_is_measured_at_other_steps_is_a_warning() -> None:
    _, (warning,) = check(GRPO, ["run.checkpoint={every: 10, best: reward.score}", "eval.every=4"])
    assert (warning.code, warning.severity) == ("HF228", "warning")
    assert "`eval.every` may be 10" in warning.help
