"""The line of a step, and what runs now."""

from __future__ import annotations

from io import StringIO
from threading import Event

import pytest
from rich.console import Console

import hflow
from hflow.graph.ir import Graph
from hflow.runtime.controller import progress
from hflow.runtime.controller.progress import RunProgress, further_metrics, numbers

TIMES = {"tokens_per_s": 5321.4, "time_s": 0.812}


def test_one_loss_needs_no_name() -> None:
    metrics = {"loss.actor_train": -0.0012, "reward_mean": 0.42, **TIMES}
    assert numbers(metrics) == ["reward 0.420", "loss -0.0012", "5,321 tokens/s", "0.81 s"]


def test_several_losses_are_named() -> None:
    metrics = {"loss.critic_train": 0.5, "loss.actor_train": -0.0012, **TIMES}
    expected = ["loss.critic_train +0.5000", "loss.actor_train -0.0012", "5,321 tokens/s", "0.81 s"]
    assert numbers(metrics) == expected


def test_shown_metrics_stand_in_place_of_reward_and_losses() -> None:
    metrics = {"loss.actor_train": -0.0012, "reward_mean": 0.42, "rollout.response_length": 3.25, **TIMES}
    shown = ["rollout.response_length", "actor_train.kl", "tokens"]
    expected = ["rollout.response_length 3.25", "actor_train.kl -", "tokens 640"]
    assert numbers({**metrics, "tokens": 640}, shown)[:3] == expected


def test_what_functions_print_is_shown_as_it_is() -> None:
    """Marks of chat templates, which look like rich's."""
    console = Console(file=StringIO(), width=80)
    text = "response: [/INST] [bold]x[/s]"
    RunProgress(1, str, console).say(text)
    assert isinstance(console.file, StringIO) and console.file.getvalue() == f"{text}\n"


REWARDS = """
  correct:
    op: call
    fn: hflow.ops.rewards.exact_match
    in: {text: rollout.text, answer: prompts.answer}

  score:
    op: call
    fn: hflow.ops.rewards.format_match
    in: {text: rollout.text}
    with: {pattern: "[0-9]+"}

  reward:
    fn: hflow.ops.rewards.add
    in: {text: null, answer: null, score: correct.score, other: score.score}
"""
STEP = {
    "step": 4,
    "loss.actor_train": -0.0012,
    "reward_mean": 0.42,
    "actor_train.grad_norm": 0.3123,
    "rollout.response_length": 317.25,
    "correct.score": 0.25,
    "score.score": 0.8,
    "reward.score": 0.42,
    "actor_train.kl": 0.001234,
    "time_s.score": 0.001,
    "digest.score": "1f",
    **TIMES,
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """GRPO with a reward of two parts, of which one has a name that other metrics end in."""
    file = tmp_path_factory.mktemp("graph") / "two.yaml"
    file.write_text(f"hflow: 1\nextends: grpo\nname: two\n\nnodes:{REWARDS}")
    return hflow.load(file)


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "step  5/30  reward 0.420  loss -0.0012  correct 0.250  5,321 tokens/s  0.81 s"),
        (
            120,
            "step  5/30  reward 0.420  loss -0.0012  correct 0.250  score 0.800  length 317.2  kl 0.0012"
            "  5,321 tokens/s  0.81 s",
        ),
    ],
)
def test_a_line_is_filled_with_what_else_there_is(width: int, line: str, graph: Graph) -> None:
    log, further = StringIO(), further_metrics(graph)
    RunProgress(30, str, Console(file=log, width=width), further=further).step(STEP)
    assert log.getvalue() == line + "\n" and len(line) <= width


def test_what_is_no_number_is_left_out(graph: Graph) -> None:
    metrics = {**STEP, "actor_train.kl": "none", "correct.score": "1f", "score.score": None}
    assert numbers(metrics, (), further_metrics(graph), 200)[2:4] == ["length 317.2", "grad 0.31"]


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        ("grpo", ["rollout.response_length", "actor_train.kl", "actor_train.grad_norm"]),
        ("ppo", ["rollout.response_length", "actor_train.kl", "actor_train.grad_norm"]),
        ("sft", ["actor_train.kl", "actor_train.grad_norm"]),
    ],
)
def test_one_reward_is_not_said_twice_and_the_actor_is_meant(algorithm: str, names: list[str]) -> None:
    assert [each.name for each in further_metrics(hflow.load(f"algorithms/{algorithm}.yaml"))] == names


def test_lines_of_a_log_are_whole_and_a_live_line_fits() -> None:
    shown = [f"node.metric_{number}" for number in range(9)]
    metrics = {"step": 4, **dict.fromkeys(shown, 0.5), **TIMES}
    log = StringIO()
    RunProgress(30, str, Console(file=log, width=80), shown=shown).step(metrics)
    (line,) = log.getvalue().splitlines()
    assert line.startswith("step  5/30  node.metric_0 0.5  node.metric_1 0.5") and line.endswith("  0.81 s")
    screen = StringIO()
    console = Console(file=screen, width=120, force_terminal=True)
    with RunProgress(30, str, console, shown=shown) as live:
        live.step(metrics)
    assert "node.metric_1 0.5" in screen.getvalue() and "node.metric_2" not in screen.getvalue()


def test_the_node_that_runs_is_recorded_when_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_POLL_S", 0.001)
    places = iter(["", "prompts", "rollout", "rollout", "actor_train"])
    recorded, done = list[str](), Event()

    def where() -> str:
        place = next(places, "")
        if not place and recorded:
            done.set()
        return place

    with RunProgress(3, where, Console(file=StringIO()), recorded.append):
        assert done.wait(60)
    assert recorded[:3] == ["prompts", "rollout", "actor_train"]
