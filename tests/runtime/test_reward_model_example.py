"""The example that trains a reward model and then a policy on it, by its script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.reward_model.task import LETTERS, LONGEST, rule

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples/reward_model"


def test_the_rule_counts_vowels() -> None:
    assert rule("aeaeae") == 1.0 and rule("") == 0.0 and rule("bcdfgh") == -1.0
    assert rule("ab") == 0.0 and rule("aab") == pytest.approx(1 / 6)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("one", "two"):
        subprocess.run([sys.executable, EXAMPLE / "task.py", folder / name], cwd=ROOT, check=True)
    return folder


def test_the_better_response_is_the_chosen_one(data: Path) -> None:
    pairs = [json.loads(line) for line in (data / "one/pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == 6000
    vowels = lambda text: sum(text.count(v) for v in "ae") * 2 - len(text)  # noqa: E731
    for pair in pairs:
        assert set(pair["chosen"] + pair["rejected"]) <= set(LETTERS)
        assert max(map(len, (pair["chosen"], pair["rejected"]))) <= LONGEST
        assert vowels(pair["chosen"]) > vowels(pair["rejected"])


def test_the_data_are_the_same_each_time(data: Path) -> None:
    for name in ("pairs.jsonl", "demonstrations.jsonl"):
        assert (data / "one" / name).read_bytes() == (data / "two" / name).read_bytes()


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
def test_a_policy_learns_from_a_reward_model_that_learned_from_pairs(tmp_path: Path) -> None:
    """The figures are those of README.md; the task is deterministic, and one worker runs it."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [EXAMPLE / "run.sh", tmp_path / "runs"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    reward, ppo = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())["eval"]
        for name in ("reward", "ppo")
    )
    assert reward["before"] == 0.5 and reward["after"] >= 0.9
    assert ppo["before"] < 0.0 and ppo["after"] - ppo["before"] >= 0.5
    assert "reward model, accuracy on held-out pairs" in done.stdout
