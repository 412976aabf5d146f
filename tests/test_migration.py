"""Names of other libraries: what is told to write here exists, docs tell the same, examples mean the same."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import hflow
from hflow.cli.app import app
from hflow.diagnostics import HflowError, render
from hflow.graph.foreign.foreign_name import ForeignName, said
from hflow.graph.foreign.lookup import ELSEWHERE, TABLES, answer, foreign_names
from hflow.graph.infer.functions import read_function
from hflow.graph.infer.kinds import call, data, generate, score, train
from hflow.graph.ir import Graph
from hflow.graph.load import check
from hflow.graph.source.schema import OPS, keys_at
from tests.test_docs import section, table
from tests.test_docs_code import blocks, whole, write_named

ROOT = Path(__file__).parent.parent
PAGES = {"TRL": ROOT / "docs/from-trl.md", "verl": ROOT / "docs/from-verl.md"}
OPTIONS = {
    "data": data.OPTIONS,
    "generate": (*generate.OPTIONS, *generate.CONTINUE_OPTIONS),
    "score": score.OPTIONS,
    "train": train.OPTIONS,
    "call": call.OPTIONS,
    "repeat": (),
}
SECTIONS = [(library, heading) for library, lines in TABLES.items() for heading in lines]
LINES = [*ELSEWHERE, *(line for lines in TABLES.values() for each in lines.values() for line in each)]


@cache
def flags() -> frozenset[str]:
    """The options of the commands that compile and run."""
    group: Any = typer.main.get_command(app)
    found = (param.opts for name in ("compile", "exec") for param in group.commands[name].params)
    return frozenset(option for options in found for option in options)


def exists(own: str) -> bool:
    """Whether hflow has what a line of the tables says."""
    if own.startswith("-"):
        return own in flags()
    key, _, place = own.partition(" of ")
    if place in OPS:
        is_option = key in {option.name for option in OPTIONS[place]}
        return is_option or is_key(("nodes", "NAME", *key.split(".")), place)
    if place:
        return key in (function_options(place) or ())
    return function_options(key) is not None if key.startswith("hflow.") else is_key(tuple(key.split(".")))


def function_options(reference: str) -> frozenset[str] | None:
    """None where there is no such function."""
    try:
        return frozenset(option.name for option in read_function(reference, ROOT).options)
    except HflowError:
        return None


def is_key(path: tuple[str, ...], op: str | None = None) -> bool:
    """Whether every part of the path is a key of the schema, or a name of the user's own."""
    for depth, key in enumerate(path):
        known = keys_at(path[:depth], op)
        if key != "NAME" and key not in (known or ()):
            return False
    return True


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.names[0])
def test_what_is_told_exists(line: ForeignName) -> None:
    assert [own for own in line.ours if not exists(own)] == []
    assert line.ours or line.remark, "where there is nothing, the reason is told"
    assert line.remark == line.remark.rstrip(". ")


@pytest.mark.parametrize(
    "own",
    [
        "clip_gradd of train", "loss of generate", "repeat.epoch of train", "run.checkpoint.evry",
        "run.trackres", "models.NAME.type", "evaluations.NAME.rate", "seeds", "--pins",
        "clip of hflow.ops.losses.ppo",
        "clips of hflow.ops.losses.ppo_clip", "hflow.ops.whitening.white", "lr of optimizer",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_noticed(own: str) -> None:
    assert not exists(own)


def test_no_table_says_a_name_twice() -> None:
    for library, heading in SECTIONS:
        names = [name for line in TABLES[library][heading] for name in line.names]
        assert len(names) == len(set(names)), (library, heading)


def test_names_of_transformers_are_its_own() -> None:
    """Those that all trainers of TRL have, but for one that transformers had until version 5."""
    arguments = pytest.importorskip("transformers").TrainingArguments
    known = {field.name for field in dataclasses.fields(arguments)} | {"warmup_ratio"}
    lines = TABLES["TRL"]["TrainingArguments"]
    assert {name for line in lines for name in line.names} - known == set()


def documented(library: str, heading: str) -> list[tuple[tuple[str, ...], str]]:
    """The lines of a page's table: their names, and what is to be written here."""
    rows = table(section(PAGES[library].read_text(), f"## {heading}"), library)
    return [(tuple(cell.strip("` ") for cell in row[0].split(",")), row[1].strip("`")) for row in rows]


@pytest.mark.parametrize(("library", "heading"), SECTIONS)
def test_the_pages_tell_what_errors_tell(library: str, heading: str) -> None:
    lines = TABLES[library][heading]
    short = [tuple(n.removeprefix("actor_rollout_ref.") for n in line.names) for line in lines]
    assert documented(library, heading) == [(n, line.told.strip("`")) for n, line in zip(short, lines)]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("top-p", "`top_p` of `generate`"), ("stop_strings", "`stop` of `generate`"),
        ("scheduler", "`schedule` of `train`"), ("lr_scheduler_type", "`schedule` of `train`"),
        ("warmup_ratio", "`warmup_steps` of `train`"), ("warmup_steps", "`warmup_steps` of `train`"),
        ("wandb", "`run.trackers`"), ("report_to", "`run.trackers`"),
        ("max_grad_norm", "`clip_grad` of `train`"), ("grad_clip", "`clip_grad` of `train`"),
        ("lora_r", "`models.NAME.adapter.rank`"), ("peft_config", "`models.NAME.adapter`"),
        ("save_steps", "`run.checkpoint.every`"), ("save_freq", "`run.checkpoint.every`"),
        ("chat_template", "`chat_template` of `data`"), ("num_generations", "`n` of `generate`"),
        ("num_train_epochs", "`loop.times`"), ("max_completion_length", "`max_new_tokens` of `generate`"),
        ("max_response_length", "`max_new_tokens` of `generate`"),
        ("response_length", "`max_new_tokens` of `generate`"), ("bf16", "`models.NAME.dtype`"),
        ("gradient_checkpointing", "`--pin`"), ("use_vllm", "`--engine`"),
        ("ppo_mini_batch_size", "`repeat.minibatch` of `train`"), ("adam_beta1", "`betas` of `train`"),
        ("gradient_accumulation_steps", "`repeat.minibatch` of `train`"),
        ("kl_loss_coef", "`kl_coef` of `hflow.ops.losses.ppo_clip`"),
        ("mini_batch_size", "`repeat.minibatch` of `train`"),
        ("rollout.n", "`n` of `generate`"), ("actor_rollout_ref.rollout.n", "`n` of `generate`"),
        ("+actor_rollout_ref.rollout.val_kwargs.n", "`evaluations.NAME.sampling`"),
        ("TRAINER.Save-Freq", "`run.checkpoint.every`"), ("--learning-rate", "`lr` of `train`"),
    ],
)  # fmt: skip
def test_the_obvious_names_are_known(name: str, told: str) -> None:
    assert {line.told for line in foreign_names(name)} == {told}
    shown = f"in hflow: {told}" if told != "none" else "hflow has no counterpart: "
    assert answer(name).startswith(shown)


@pytest.mark.parametrize("name", ["", "n_", "stepz", "path", "name", "nodes.rollout.with.n", "what", "los"])
def test_other_names_are_not(name: str) -> None:
    assert answer(name) == ""


def test_a_name_that_means_two_things_tells_both() -> None:
    assert [line.told for line in foreign_names("beta")] == [
        "`kl_coef` of `hflow.ops.losses.ppo_clip`",
        "`beta` of `hflow.ops.preferences.dpo`",
    ]
    assert answer("beta").count("\n") == 1


@pytest.mark.parametrize("name", ["foreign_options", "foreign_keys"])
def test_errors_tell_what_to_write(name: str, golden: Callable[[str, str], None]) -> None:
    """Names that no table has, as `cliip`, are still told the nearest of ours."""
    path = Path(f"tests/bad/{name}.yaml")
    with pytest.raises(HflowError) as refused:
        check(path)
    texts = {str(path): path.read_text()}
    golden(f"diagnostics/{name}.txt", "\n\n".join(render(d, texts) for d in refused.value.diagnostics))


@pytest.mark.parametrize(
    ("override", "help_"),
    [
        ("actor_rollout_ref.rollout.n=8", "in hflow: `n` of `generate`"),
        ("learning_rate=1e-5", "in hflow: `lr` of `train`"),
        ("run.save_steps=5", "in hflow: `run.checkpoint.every`"),
        ("node.rollout.with.n=8", "did you mean `nodes`?"),
    ],
)
def test_overrides_are_told_too(override: str, help_: str) -> None:
    with pytest.raises(HflowError) as refused:
        hflow.load("algorithms/grpo.yaml", [override])
    assert [(d.code, d.help) for d in refused.value.diagnostics] == [("HF105", help_)]


def test_evaluations_are_told_too(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(
        "hflow: 1\nextends: grpo\nname: x\nevaluations:\n  test:\n    rows: 8\n"
        "    sampling: {num_return_sequences: 4}\n    metrics: {right: reward.score}\n"
    )
    with pytest.raises(HflowError) as refused:
        check(file)
    assert [(d.code, d.help) for d in refused.value.diagnostics] == [("HF211", "in hflow: `n` of `generate`")]


def test_what_is_meant_by_another_name_is_not_missing_too() -> None:
    """`lr` is required, and `learning_rate` is told of once."""
    with pytest.raises(HflowError) as refused:
        check("tests/bad/foreign_options.yaml")
    assert {d.code for d in refused.value.diagnostics} == {"HF211"}


def trl_settings() -> Iterator[tuple[str, Any]]:
    """The arguments of `GRPOConfig` in the page's script."""
    script = next(text for _, text in blocks(PAGES["TRL"], "python") if "GRPOConfig(" in text)
    calls = (node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call))
    config = next(c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "GRPOConfig")
    yield from ((str(word.arg), ast.literal_eval(word.value)) for word in config.keywords)


def verl_settings() -> Iterator[tuple[str, Any]]:
    """The overrides of the page's command."""
    text = next(text for _, text in blocks(PAGES["verl"], "sh") if "main_ppo" in text)
    for word in shlex.split(text.replace("\\\n", " ")):
        name, equals, value = word.partition("=")
        if equals:
            yield name, float(value) if re.fullmatch(r"[\d.]+(e-\d+)?", value) else value


# What the file says where the value is another one than theirs, worked out by hand.
TRANSLATED: Mapping[str, Mapping[str, Any]] = {
    "TRL": {
        "per_device_train_batch_size": (32 * 4 // 8, 32 * 4),  # one device; prompts, responses
        "gradient_accumulation_steps": (32 * 4,),
        "report_to": ("tensorboard",),
    },
    "verl": {
        "actor_rollout_ref.actor.ppo_mini_batch_size": (256 * 5,),
        "actor_rollout_ref.actor.kl_loss_type": ("k3",),
        "data.val_files": ({"dataset": "data/gsm8k/test.parquet"},),
        "reward.custom_reward_function.path": ("./gsm8k.py:compute_score",),
        "algorithm.adv_estimator": ("./gsm8k.py:compute_score", "hflow.ops.advantages.group_normalise"),
        "trainer.logger": ("wandb",),
    },
}
# No values of the file: nodes, inputs, and options of commands.
TOLD_ELSEWHERE = {
    "output_dir", "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "trainer.n_gpus_per_node",
}  # fmt: skip
SETTINGS = {"TRL": [*trl_settings()], "verl": [*verl_settings()]}


def values(own: str, graph: Graph, run: hflow.RunConfig) -> list[Any]:
    """What a graph says under a key of the tables, of all nodes, models and evaluations that have it."""
    key, _, place = own.partition(" of ")
    nodes = [n for n in graph.nodes if place in (n.op, n.function.reference if n.function else "")]
    if key.startswith("repeat."):
        return [getattr(n.repeat, key.removeprefix("repeat.")) for n in nodes if n.repeat]
    if place and key == "fn":
        return [n.function.reference for n in nodes if n.function]
    if place:
        return [n.options[key] for n in nodes if key in n.options]
    match key.split("."):
        case ["run", "checkpoint", inner]:
            return [getattr(run.checkpoint, inner)]
        case ["run", inner]:
            return [*getattr(run, inner)]
        case ["models", _, inner]:
            return [getattr(model, inner) for model in graph.models]
        case ["evaluations", _, inner]:
            return [getattr(evaluation, inner) for evaluation in graph.evaluations]
        case ["loop", "times"]:
            return [graph.steps]
        case _:
            return [getattr(graph, key)]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Graph, hflow.RunConfig]]:
    """The file of each page, loaded."""
    found: dict[str, tuple[Graph, hflow.RunConfig]] = {}
    for library, page in PAGES.items():
        folder = tmp_path_factory.mktemp(library)
        write_named(page, folder)
        ((name, _),) = whole(page)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)  # where files of functions lie
            found[library] = hflow.load(name), hflow.run_config(name)
    return found


@pytest.mark.parametrize(
    ("library", "name", "value"),
    [(library, name, value) for library, settings in SETTINGS.items() for name, value in settings],
)
def test_the_examples_say_what_theirs_say(
    library: str, name: str, value: Any, examples: dict[str, tuple[Graph, hflow.RunConfig]]
) -> None:
    """Each of their settings is in the tables, and the file beside it has its value where the tables say."""
    (line,) = foreign_names(name)[:1]
    assert name in line.names
    if name in TOLD_ELSEWHERE:
        return
    graph, run = examples[library]
    expected = TRANSLATED[library].get(name, (value,) * len(line.ours))
    found = [each for own in line.ours for each in values(own, graph, run)]
    assert found, line.ours
    assert [e for e in expected if e not in found] == [], found


def test_a_line_is_told_with_marks() -> None:
    assert said("a", "lr of train, --pin").told == "`lr` of `train`, `--pin`"
