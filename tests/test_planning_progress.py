"""What a terminal shows while plans are looked for, and that nobody else is shown it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from hflow.runtime.tools.new_model import new_model
from tests.on_a_terminal import on_a_terminal

HFLOW = [sys.executable, "-m", "hflow.cli.app"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    new_model(folder, layers=2, hidden=32, seed=1)
    return str(folder)


@pytest.mark.slow
def test_exhaustive_tells_a_terminal_how_many_plans_are_priced(model: str) -> None:
    command = ("compile", "algorithms/grpo.yaml", "--set", f"params.model={model}", "--json")
    command = (*command, "--cluster", "local4", "--planner", "exhaustive")
    printed, lines = on_a_terminal(*command)
    counted = [re.search(r"plans priced +(\d+) of (\d+) ", line) for line in lines]
    told = [(int(found[1]), int(found[2])) for found in counted if found]
    explored = json.loads(printed)["search"]["explored"]
    assert told and all(priced <= total for priced, total in told)
    assert 0 < explored <= sum({total for _, total in told})  # those that do not fit are not explored
    assert [total for priced, total in told if priced == total]

    alone = subprocess.run([*HFLOW, *command], capture_output=True, text=True, timeout=120)
    assert alone.returncode == 0 and "priced" not in alone.stderr
    ours, theirs = json.loads(printed), json.loads(alone.stdout)
    assert {**ours, "search": None} == {**theirs, "search": None}


def test_other_planners_tell_that_they_look(model: str) -> None:
    _, lines = on_a_terminal("compile", "algorithms/sft.yaml", "--set", f"params.model={model}")
    assert any("looking for the best plan" in line for line in lines)
