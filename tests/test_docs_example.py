"""The plan that README and docs/plans.md explain is the one that hflow makes now. To accept a change:

python -m tests.test_docs_example

rewrites the README's output; the figures in docs/plans.md are to be mended by hand.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

import hflow
from hflow.compiler.plan import EdgePlan, Plan
from hflow.runtime.new_model import new_model
from hflow.view.terminal import plan_text

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
SHOWN = re.compile(r"(?<=```text\n)grpo .*?(?=\nwrote)", re.DOTALL)
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


def weights(plan: Plan) -> EdgePlan:
    return next(e for e in plan.step.edges if e.kind == "weights")


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
    figures = [plan.shapes["actor"].num_parameters, rows.size_bytes, rows.bytes_per_device]
    figures += [moved.size_bytes, moved.bytes_per_device, moved.peak_bytes]
    figures += [weights(compiled(REGROUPED)).bytes_per_device]
    assert [f for f in figures if f"{f:,}" not in text] == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        new_model(Path(work) / "models/tiny")
        os.chdir(work)
        shown = plan_text(compiled(PINS))
        README.write_text(SHOWN.sub(lambda _: shown, README.read_text()))
