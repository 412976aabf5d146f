"""What README, docs/plans.md and docs/cost-of-an-algorithm.md show is what hflow has now. To accept changes:

python -m tests.test_docs_example

rewrites the README's plan and the table of lines; the figures in docs/plans.md are to be mended by hand.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

import hflow
from hflow.graph.infer.functions import find_module
from hflow.plan.edges import WeightEdge
from hflow.plan.parameters import num_parameters
from hflow.plan.plan import Plan
from hflow.runtime.tools.new_model import new_model
from hflow.view.terminal.terminal import plan_text

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COST = ROOT / "docs/cost-of-an-algorithm.md"
LINES = re.compile(r"(?<=<!-- lines -->\n).*?(?=<!-- end of lines -->)", re.DOTALL)
NEW_EDGES = ("remax", "safe_rlhf", "dapo")
SHOWN = re.compile(r"(?<=```text\n)(?:(?!```).)*?(?=\nwrote)", re.DOTALL)
PINS = ("actor_train=tp2,dp2@0-3", "rollout=dp4@0-3")
REGROUPED = ("actor_train=tp4@0-3", "rollout=tp2,dp2@0-3")


def compiled(pins: tuple[str, ...]) -> Plan:
    """The documented plan; the present folder has the model at ``models/tiny``, as its hash demands."""
    graph = hflow.load(ROOT / "algorithms/grpo.yaml")
    return hflow.compile(graph, ROOT / "clusters/local4.yaml", pins)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `hflow new-model models/tiny` has run."""
    folder = tmp_path_factory.mktemp("docs")
    new_model(folder / "models/tiny")
    return folder


def weights(plan: Plan) -> WeightEdge:
    return next(e for e in plan.step.edges if isinstance(e, WeightEdge))


def test_the_readme_shows_the_present_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert SHOWN.findall(README.read_text()) == [plan_text(compiled(PINS))]


def test_the_figures_of_the_worked_example_are_the_plans(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    plan, text = compiled(PINS), (ROOT / "docs/plans.md").read_text()
    rows = next(e for e in plan.step.edges if (e.source, e.target) == ("rollout", "actor_train"))
    moved = weights(plan)
    figures = [num_parameters(plan.shapes["actor"]), rows.size_bytes, rows.bytes_per_device]
    figures += [moved.size_bytes, moved.bytes_per_device, moved.peak_bytes]
    figures += [weights(compiled(REGROUPED)).bytes_per_device]
    assert [f for f in figures if f"{f:,}" not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "first"),
    [
        ("--explain actor_train", r"actor_train: \d+ layouts compared"),
        ("--efficiency", "node +of step +MFU .*?"),
        ("--sensitivities", "if there were {10,}step .*?"),
        ("--what-if", "if there were {1,9}step .*?"),
    ],
)
def test_what_is_asked_of_a_plan_is_what_is_printed(option: str, first: str, tmp_path: Path) -> None:
    text = (ROOT / "docs/plans.md").read_text()
    (sizes,) = re.findall(r"`sizes.yaml`:\n\n```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "sizes.yaml").write_text(sizes)
    (command,) = re.findall(rf"```sh\n(hflow compile [^`]*?{option} [^`]*)```", text)
    words = shlex.split(command.replace("\\\n", " ").replace("algorithms/", f"{ROOT}/algorithms/"))[1:]
    run = [sys.executable, "-m", "hflow.cli.app", *words]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    (shown,) = re.findall(rf"```text\n({first}\n.*?)```", text, re.DOTALL)
    assert shown in done.stdout


@pytest.mark.slow
def test_the_sweep_is_what_is_printed(tmp_path: Path) -> None:
    text = (ROOT / "docs/plans.md").read_text()
    ((command, shown),) = re.findall(r"```sh\n(hflow sweep [^`]*)```\n\n```text\n(.*?)```", text, re.DOTALL)
    run = [sys.executable, "-m", "hflow.cli.app", *shlex.split(command.replace("\\\n", " "))[1:]]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == shown
    assert len((tmp_path / "build/sweep.csv").read_text().splitlines()) == 1 + 6


def num_lines(text: str) -> int:
    """Lines that are neither blank nor comment."""
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


def function_lines(reference: str) -> int:
    """Lines of a function and its signature, without the docstring."""
    module, _, name = reference.rpartition(".")
    text = find_module(module).read_text()
    (function,) = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    first, last, told = function.decorator_list[0].lineno, function.end_lineno, function.body[0]
    assert ast.get_docstring(function)
    lines = text.splitlines()
    return num_lines("\n".join([*lines[first - 1 : told.lineno - 1], *lines[told.end_lineno : last]]))


def cost_table() -> str:
    """Lines of the algorithms with new edges, and of the functions that no other algorithm uses."""
    files = sorted((ROOT / "algorithms").glob("*.yaml"))
    functions = {f.stem: {n.function.reference for n in hflow.load(f).nodes if n.function} for f in files}
    users = Counter(reference for used in functions.values() for reference in used)
    rows = ["| algorithm | graph file | functions that only it uses |", "|---|---|---|"]
    for name in NEW_EDGES:
        own = sorted(reference for reference in functions[name] if users[reference] == 1)
        told = ", ".join(f"`{ref.rpartition('.')[2]}` {function_lines(ref)}" for ref in own)
        lines = num_lines((ROOT / f"algorithms/{name}.yaml").read_text())
        rows.append(f"| {name} | {lines} lines | {told} lines |")
    return "\n" + "\n".join(rows) + "\n\n"


def test_the_lines_of_algorithms_are_counted() -> None:
    assert LINES.findall(COST.read_text()) == [cost_table()]


if __name__ == "__main__":
    COST.write_text(LINES.sub(lambda _: cost_table(), COST.read_text()))
    with tempfile.TemporaryDirectory() as work:
        new_model(Path(work) / "models/tiny")
        os.chdir(work)
        shown = plan_text(compiled(PINS))
        README.write_text(SHOWN.sub(lambda _: shown, README.read_text()))
