"""A plan runs with the models that it was compiled with, and tells of functions that are others by now."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import hflow
from hflow.diagnostics import HflowError
from hflow.plan.plan import Plan
from hflow.runtime.controller.inline_pool import InlinePool
from hflow.runtime.execute import execute

GRAPH = Path(__file__).parent / "grpo_small.yaml"


@pytest.fixture
def plan(tiny_model: Path, tmp_path: Path) -> Plan:
    """Of a graph, a function and a model of its own."""
    shutil.copytree(tiny_model, tmp_path / "model")
    for name in (GRAPH.name, "rewards.py"):
        shutil.copy(GRAPH.parent / name, tmp_path)
    overrides = [f"params.model={tmp_path / 'model'}", "params.steps=1"]
    return hflow.compile(hflow.load(tmp_path / GRAPH.name, overrides), "local1")


def with_other_positions(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["rope_theta"] = 99.0
    file.write_text(json.dumps(config))


def test_a_changed_model_is_refused_before_anything_starts(plan: Plan, tmp_path: Path) -> None:
    with_other_positions(tmp_path / "model")
    with pytest.raises(
        HflowError, match=r"HF406(.|\n)*has changed since the graph was compiled: `config.json`"
    ):
        execute(plan, tmp_path / "run", workers="inline")
    assert not (tmp_path / "run").exists()


def test_workers_look_at_the_folder_of_their_own_host(plan: Plan, tmp_path: Path) -> None:
    """The driver may not see it, or another one."""
    with_other_positions(tmp_path / "model")
    pool = InlinePool()
    try:
        pool.form(1)
        with pytest.raises(HflowError, match=r"HF406(.|\n)*has changed since the graph was compiled"):
            pool.call("load", plan)
    finally:
        pool.close()


def test_a_changed_function_is_told_and_runs(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(file.read_text() + "\n# changed\n")
    told = io.StringIO()
    console = Console(file=told, width=200)
    run = execute(plan, tmp_path / "run", workers="inline", export=False, console=console)
    assert run.status == "finished"
    message = f"`{file}` has changed since the graph was compiled"
    assert f"warning[HF306]: {message}\n" in told.getvalue()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "started"
    assert [(e["code"], e["message"]) for e in events if e["event"] == "warning"] == [("HF306", message)]


def test_nothing_is_told_of_what_is_as_it_was(plan: Plan, tmp_path: Path) -> None:
    told = io.StringIO()
    execute(plan, tmp_path / "run", workers="inline", export=False, console=Console(file=told, width=200))
    assert "warning" not in told.getvalue()
