"""`hflow export` writes the model that the run would have exported at that step, and starts no worker."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.run_config import CheckpointPolicy, RunConfig
from hflow.plan.origin import GRAPH_FILE, PLAN_FILE, origin_of
from hflow.plan.plan_file import load_plan
from hflow.report.export_run import Exported, export_run
from hflow.report.read_origin import read_origin
from hflow.runtime.controller.checkpoints import name_of
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.tools.new_model import new_model
from tests.runtime.matrix import GRAPHS
from tests.runtime.test_failures import HFLOW
from tests.runtime.test_resume import graph_of, plan_of

POLICY = CheckpointPolicy(every=1, keep=9, best="loss.actor_train", mode="max")
STEPS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Params that name a language model, and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    for name, head in (("model", "lm"), ("reward_model", "scalar")):
        new_model(
            folder / name, layers=1, hidden=16, heads=2, ffn=32, alphabet="0123456789+=. ", max_positions=64,
            head=head, seed=3,
        )  # fmt: skip
    return [f"params.{name}={folder / name}" for name in ("model", "reward_model")]


@pytest.fixture(scope="module")
def run_of(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Run]:
    """PPO after so many steps, with a checkpoint of each: an actor in its dtype and a critic."""
    folder = tmp_path_factory.mktemp("runs")
    made: dict[int, Run] = {}

    def run(steps: int) -> Run:
        if steps not in made:
            graph = hflow.load(GRAPHS / "ppo_small.yaml", [*models, f"params.steps={steps}"])
            plan = hflow.compile(graph, "local1")
            made[steps] = execute(plan, folder / str(steps), workers="inline", config=RunConfig(POLICY))
        return made[steps]

    return run


@pytest.fixture
def runs(run_of: Callable[[int], Run], tmp_path: Path) -> Path:
    """A folder with a copy of the run `ppo`, whose checkpoints are of steps 1 to 3."""
    shutil.copytree(run_of(STEPS).folder, tmp_path / "runs" / "ppo")
    return tmp_path / "runs"


def export(runs: Path, name: str, model: str | None = None, to: Path | None = None) -> list[Exported]:
    return export_run(name, runs, model, to, pytest.fail)


def refused(runs: Path, name: str, model: str | None = None, to: Path | None = None) -> str:
    before = sorted(runs.parent.rglob("*"))
    with pytest.raises(HflowError) as caught:
        export(runs, name, model, to)
    assert sorted(runs.parent.rglob("*")) == before
    (found,) = caught.value.diagnostics
    return f"{found.code} {found.message}; {found.help}"


def assert_same_files(ours: Path, theirs: Path) -> None:
    names = sorted(file.name for file in theirs.iterdir())
    assert sorted(file.name for file in ours.iterdir()) == names and "model.safetensors" in names
    model = [name for name in names if name not in (GRAPH_FILE, PLAN_FILE)]
    assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in model)


@pytest.mark.slow
def test_it_is_the_model_that_a_run_of_so_many_steps_exports(
    run_of: Callable[[int], Run], runs: Path
) -> None:
    for step in (1, 2, STEPS):
        done = export(runs, f"ppo@{step}")
        assert [(d.model, d.step) for d in done] == [("actor", step), ("critic", step)]
        for exported in done:
            assert exported.folder == runs / "ppo" / "export" / f"{exported.model}-step-{step}"
            assert_same_files(exported.folder, run_of(step).folder / "export" / exported.model)
            assert origin_of(load_plan(runs / "ppo/plan.json")) == read_origin(exported.folder)
    first = run_of(1).folder
    assert origin_of(load_plan(first / "plan.json")) == read_origin(first / "export/actor")


@pytest.mark.parametrize("layout", ["dp2,zero1@0-1", "tp2@0-1", "pp2@0-1", "pp2,tp2@0-3"])
def test_of_any_plan_it_is_what_the_run_exports(
    workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path, layout: str
) -> None:
    plan = plan_of(graph_of("ppo_small", tiny_model, tiny_reward), layout)
    run = execute(plan, tmp_path / "run", pool=workers, config=RunConfig(POLICY))
    done = export(tmp_path, "run")
    assert [(d.model, d.step) for d in done] == [("actor", plan.graph.steps), ("critic", plan.graph.steps)]
    for exported in done:
        assert_same_files(exported.folder, run.folder / "export" / exported.model)


def test_transformers_loads_what_it_writes(runs: Path, tmp_path: Path) -> None:
    (actor,) = export(runs, "ppo", "actor", tmp_path / "actor")
    (critic,) = export(runs, "ppo", "critic", tmp_path / "critic")
    assert actor.step == critic.step == STEPS
    text = AutoTokenizer.from_pretrained(actor.folder)("1+2=", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(actor.folder)
    stored = load_file(actor.folder / "model.safetensors")
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert model(**text).logits.isfinite().all()
    value = AutoModelForSequenceClassification.from_pretrained(critic.folder)
    assert value.config.num_labels == 1 and value.config.architectures == ["Qwen2ForSequenceClassification"]


def test_the_best(run_of: Callable[[int], Run], runs: Path) -> None:
    losses = [line["loss.actor_train"] for line in run_of(STEPS).metrics]
    best = 1 + losses.index(max(losses))
    done = export(runs, f"{runs / 'ppo'}@best", "actor")
    assert [d.step for d in done] == [best]
    assert done[0].folder == runs / "ppo" / "export" / f"actor-step-{best}"


def test_a_damaged_newest_is_passed_over_and_told(runs: Path) -> None:
    file = next((runs / "ppo" / "checkpoints" / name_of(STEPS)).glob("rank-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    told: list[str] = []
    done = export_run("ppo", runs, "actor", None, told.append)
    assert [d.step for d in done] == [STEPS - 1] and not (runs / "ppo/export/actor-step-3").exists()
    assert told[0].startswith("passed over: error[HF412]") and "checksum" in told[0]
    at_end = f"`actor` as it was then is in `{runs / 'ppo/export/actor'}`"
    assert told[1:] == [f"note: the run ended after {STEPS} steps; {at_end}"]
    assert refused(runs, f"ppo@{STEPS}").startswith("HF412")  # the one that was asked for, and no other
    for step in (1, 2):
        shutil.rmtree(runs / "ppo" / "checkpoints" / name_of(step))
    assert refused(runs, "ppo").startswith("HF412")


def test_nothing_is_overwritten(runs: Path, tmp_path: Path) -> None:
    assert refused(runs, "ppo", "actor", runs / "ppo" / "export" / "actor").startswith("HF406")
    export(runs, "ppo")
    assert "actor-step-3` exists; remove it, or name another folder with --to" in refused(runs, "ppo")
    (tmp_path / "link").symlink_to("nowhere")
    assert "link` exists" in refused(runs, "ppo", "actor", tmp_path / "link")


def test_what_is_not_there(runs: Path) -> None:
    assert refused(runs, "pp").startswith("HF407") and "did you mean `ppo`?" in refused(runs, "pp")
    told = refused(runs, "ppo@7")
    assert "ppo` has no checkpoint of step 7; its checkpoints: 1, 2, 3" in told
    assert refused(runs, "ppo", "acto") == "HF202 model `acto` is none of the run; did you mean `actor`?"
    assert "HF202 model `ref` is not trained" in refused(runs, "ppo", "ref")
    told = refused(runs, "ppo", None, runs / "new")
    assert told.startswith("HF001") and told.endswith("say which: --model actor or --model critic")
    shutil.rmtree(runs / "ppo" / "checkpoints")
    assert refused(runs, "ppo").startswith("HF407") and "has no checkpoint; " in refused(runs, "ppo")
    assert f"; `actor` as it was at the end is in `{runs / 'ppo/export/actor'}`; `critic`" in refused(
        runs, "ppo"
    )
    (runs / "ppo/run.yaml").write_text("run: {export: none}\n")
    assert refused(runs, "ppo").endswith("has no checkpoint; ")
    assert refused(runs, "ppo@1") == refused(runs, "ppo")


def test_the_best_of_a_run_that_has_none(runs: Path) -> None:
    run = runs / "ppo" / "run.yaml"
    text = run.read_text()
    run.write_text(text.replace("loss.actor_train", '""'))
    assert "names no metric" in refused(runs, "ppo@best")
    run.write_text(text)
    (runs / "ppo" / "metrics.jsonl").write_text("")
    assert "no checkpoint whose `loss.actor_train` is known; its checkpoints" in refused(runs, "ppo@best")


def test_the_folder_that_a_model_began_from(run_of: Callable[[int], Run], runs: Path, tmp_path: Path) -> None:
    """Its weights are of no interest; a configuration that has changed would make another model."""
    origin = Path(json.loads((runs / "ppo" / "plan.json").read_text())["step"]["graph"]["models"][0]["path"])
    weights, config = origin / "model.safetensors", origin / "config.json"
    kept = {file: file.read_bytes() for file in (weights, config)}
    try:
        weights.write_bytes(b"other")
        export(runs, "ppo", "actor")
        config.write_text(config.read_text().replace("16", "32"))
        assert "has changed since: `config.json`" in refused(runs, "ppo", "actor", tmp_path / "new")
    finally:
        for file, content in kept.items():
            file.write_bytes(content)


@pytest.mark.slow
def test_from_the_command_line(runs: Path) -> None:
    command = [*HFLOW, "export", "ppo@2", "--dir", str(runs), "--model", "actor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    folder = runs / "ppo" / "export" / "actor-step-2"
    assert done.stdout.startswith(f"exported  actor after 2 steps  {folder}  ") and folder.is_dir()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1 and again.stdout == "" and again.stderr.startswith("error[HF406]")
