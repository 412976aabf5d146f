"""`hflow compile --from RUN`: the run's graph with the lengths that it saw, beside its old plan."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hflow
from hflow.compiler.plan_pins import pins_of
from hflow.graph.lengths import Lengths
from hflow.graph.lengths_file import FILE, SeenLengths, lengths_text
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan

SEEN = {"p0": 8, "p5": 90, "p10": 130, "p25": 250, "p50": 600, "p75": 1300, "p90": 2600, "p95": 3400,
        "p99": 4096, "p100": 4096}  # fmt: skip


def compiled(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hflow.cli.app", "compile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder's plan, graph and lengths: of a plan for rows of 4,096 tokens, which were shorter."""
    folder = tmp_path_factory.mktemp("run")
    sizes = ("model=shape:llama-3.1-8b", "batch=64", "group=32", "max_new_tokens=4096", "minibatch=512")
    dtypes = [f"models.{model}.dtype=bf16" for model in ("actor", "ref")]
    graph = hflow.load("grpo", [*(f"params.{size}" for size in sizes), *dtypes])
    hflow.compile(graph, "h100x16").save(folder / "plan.json")
    (folder / "graph.yaml").write_text(graph.text)
    seen = SeenLengths(4096, Lengths(1019.0, 4096, tuple((k, float(n)) for k, n in SEEN.items())))
    (folder / FILE).write_text(lengths_text({"rollout": seen}))
    return folder


def stated(run: Path) -> Plan:
    """The same, told to the graph by hand."""
    said = hflow.load(run / "graph.yaml", [f"nodes.rollout.lengths.from={run}"])
    return hflow.compile(said, "h100x16")


@pytest.mark.slow
def test_the_runs_graph_is_planned_with_the_lengths_that_it_saw(run: Path, tmp_path: Path) -> None:
    done = compiled("--from", run, "-o", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    plan, wanted, old = load_plan(tmp_path / "plan.json"), stated(run), load_plan(run / "plan.json")
    assert plan.nodes == wanted.nodes and plan.cluster == old.cluster
    assert plan.step_time_s == wanted.step_time_s < 0.7 * old.step_time_s
    assert re.search(r"responses of rollout +4,096 +1,019 +600 +3,400", done.stdout)
    before = hflow.compile(wanted.graph, "h100x16", pins_of(old))
    assert wanted.step_time_s < before.step_time_s < old.step_time_s
    assert "nothing to compare" not in done.stdout
    change = f"({wanted.step_time_s / before.step_time_s - 1:+.1%})"
    assert change in done.stdout, "its old plan at the lengths that it saw"


@pytest.mark.slow
def test_json_is_that_of_the_plan(run: Path) -> None:
    found = json.loads(compiled("--from", run, "--json").stdout)
    assert found["step_time_s"] == stated(run).step_time_s


@pytest.mark.slow
def test_the_runs_graph_may_be_changed(run: Path) -> None:
    found = json.loads(compiled("--from", run, "--json", "--set", "params.batch=32").stdout)
    assert found["step_time_s"] < 0.7 * stated(run).step_time_s


@pytest.mark.slow
def test_graph_and_cluster_may_be_others(run: Path) -> None:
    done = compiled("grpo", "--from", run, "--cluster", "h100x8", "--set", "params.model=shape:llama-3.1-8b",
                    "--set", "params.max_new_tokens=512")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "512 at most" in done.stdout, "cut off at what the graph admits"
    assert "nothing to compare" in done.stdout, "the run's plan has 16 devices"


@pytest.mark.slow
def test_what_is_no_run_or_saw_nothing_is_refused(run: Path, tmp_path: Path) -> None:
    assert "there is no run in" in compiled("--from", tmp_path / "none").stderr
    for file in ("plan.json", "graph.yaml"):
        (tmp_path / file).write_bytes((run / file).read_bytes())
    done = compiled("--from", tmp_path)
    assert done.returncode == 1 and "has seen no lengths" in done.stderr and "first step" in done.stderr
    other = compiled("sft", "--from", run)
    assert other.returncode == 1 and "saw no lengths of nodes of" in other.stderr
    assert "HF001" in compiled().stderr, "neither graph nor run"
