"""The command line: its flags are frozen, its output is for people and programs, it starts light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from hflow.cli import app
from hflow.graph.load import load

HFLOW = [sys.executable, "-m", "hflow.cli"]
FLAGS = {
    "check": ["graph", "--set"],
    "show": ["graph", "--set"],
    "compile": ["graph", "--cluster", "--pin", "--set", "-o", "--output", "--json"],
    "exec": ["graph", "--cluster", "--pin", "--set", "--run-dir", "--address", "--workers"],
    "new-model": [
        "folder", "--family", "--layers", "--hidden", "--heads", "--kv-heads", "--ffn", "--alphabet",
        "--max-positions", "--tied", "--no-tied", "--seed", "--force", "--no-force",
    ],
}  # fmt: skip


def hflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HFLOW, *arguments], capture_output=True, text=True, timeout=120)


def test_flags_are_reviewed() -> None:
    """A new flag is a promise: add it here on purpose."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: [o for p in command.params for o in (*p.opts, *p.secondary_opts) if o != "--help"]
        for name, command in commands.items()
    }
    assert found == FLAGS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    done = hflow("new-model", str(folder), "--layers", "2", "--hidden", "32", "--seed", "1")
    assert done.returncode == 0 and "parameters" in done.stdout
    return str(folder)


def test_compile_json_has_the_promised_keys(model: str, tmp_path: Path) -> None:
    done = hflow(
        "compile", "algorithms/grpo.yaml", "--set", f"params.model={model}", "--json",
        "--pin", "actor_train=tp2", "-o", str(tmp_path / "plan.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan.keys() >= {
        "hash", "graph", "cluster", "step_time_s", "tokens_per_s", "search", "nodes", "edges", "memory",
    }  # fmt: skip
    assert plan["search"].keys() == {"seconds", "gap", "explored"}
    train = next(n for n in plan["nodes"] if n["name"] == "actor_train")
    assert train["layout"] == {"pp": 1, "tp": 2, "dp": 1} and train["devices"] == [0, 1]
    for edge in plan["edges"]:
        assert edge["bytes_per_device"] == edge["lower_bound_bytes_per_device"]
    assert all(m["peak_bytes"] <= m["capacity_bytes"] for m in plan["memory"])
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_check_is_light(algorithm: str) -> None:
    """`hflow check` imports none of the heavy packages."""
    code = (
        "import sys; from typer.testing import CliRunner; from hflow.cli import app;"
        f"r = CliRunner().invoke(app, ['check', 'algorithms/{algorithm}.yaml']);"
        "assert r.exit_code == 0, r.output;"
        "heavy = {'torch', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_compile_is_light(model: str) -> None:
    code = (
        "import sys, hflow;"
        f"hflow.compile(hflow.load('algorithms/grpo.yaml', ['params.model={model}']), 'clusters/local.yaml');"
        "heavy = {'torch', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_all_errors_of_a_file_at_once() -> None:
    done = hflow("check", "tests/bad/many_at_once.yaml")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("error[") >= 3 and "^" in done.stderr and "Traceback" not in done.stderr


def test_misuse_is_exit_code_2() -> None:
    assert hflow("exec", "--nope").returncode == 2
    assert hflow("nope").returncode == 2


def test_a_plan_takes_no_other_choices(model: str, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    assert (
        hflow("compile", "algorithms/sft.yaml", "--set", f"params.model={model}", "-o", plan).returncode == 0
    )
    for option in (("--cluster", "local4"), ("--pin", "actor_train=tp2"), ("--set", "params.steps=1")):
        done = hflow("exec", plan, *option)
        assert done.returncode == 1 and "error[HF306]" in done.stderr


def test_lag_is_refused_by_the_compiler(model: str) -> None:
    done = hflow(
        "compile", "algorithms/grpo.yaml", "--set", f"params.model={model}",
        "--set", "nodes.rollout.model={use: actor, lag: 1}",
    )  # fmt: skip
    assert done.returncode == 1 and "error[HF307]" in done.stderr


def test_the_saved_graph_is_the_one_that_ran(tmp_path: Path) -> None:
    """A graph's text, overrides included, loads as the same graph."""
    overrides = ["params.steps=3", "nodes.rollout.with.temperature=1.0", "seed=5"]
    graph = load("algorithms/grpo.yaml", overrides)
    (tmp_path / "graph.yaml").write_text(graph.text)
    again = load(tmp_path / "graph.yaml")
    assert (again.params, again.seed, again.steps) == (graph.params, 5, 3)
    assert [n.options for n in again.nodes] == [n.options for n in graph.nodes]
    assert load("algorithms/grpo.yaml").text == Path("algorithms/grpo.yaml").read_text()
