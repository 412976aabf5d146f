from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import pytest

from hflow.compiler.plan import Plan
from hflow.view import units
from hflow.view.table import table
from hflow.view.terminal import critical_path, measured_text, plan_text
from tests.view.examples import EDGES, GRAPH, NODE_PLANS, PLAN
from tests.view.examples_in_time import NUM_ROUNDS, ROUNDS_PLAN


def without_hash(text: str) -> str:
    """The hash changes with every new field of a plan, which is not the business of these tests."""
    assert PLAN.hash in text
    return text.replace(PLAN.hash, "0123456789ab")


def test_plan_text_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("view/plan.txt", without_hash(plan_text(PLAN, path="build/grpo.plan.json")))


def test_narrow_ascii_plan_text_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    text = plan_text(PLAN, width=80, ascii_only=True)
    assert text.isascii()
    golden("view/plan-80-ascii.txt", without_hash(text))


def test_measured_text_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    measured = {n.node: 1.1 * n.time_s + 2.4 * (n.node == "reward") for n in NODE_PLANS}
    golden("view/measured.txt", measured_text(PLAN, [metrics(measured)]))


def test_only_what_is_off_is_flagged() -> None:
    times = {n.node: n.time_s for n in NODE_PLANS}
    assert flagged(PLAN, metrics({**times, "rollout": 1.24 * times["rollout"]})) == []
    assert flagged(PLAN, metrics({**times, "rollout": 0.7 * times["rollout"]})) == ["rollout"]


def test_what_is_off_by_little_of_the_step_is_not_flagged() -> None:
    times = {n.node: n.time_s for n in NODE_PLANS}
    step_s = sum(times.values())
    assert 3 * times["prompts"] < 0.05 * step_s
    assert flagged(PLAN, metrics({**times, "prompts": 3 * times["prompts"]})) == []
    reward_s = times["reward"] + 0.04 * step_s
    assert reward_s > 1.25 * times["reward"]
    assert flagged(PLAN, metrics({**times, "reward": reward_s})) == []
    assert flagged(PLAN, metrics({**times, "reward": reward_s + 0.04 * step_s})) == ["reward"]


def test_more_rounds_than_predicted_are_no_miss_of_the_prediction() -> None:
    """Predicted are 3 rounds; 6 take twice as long, and as long as predicted if each took as long."""
    inner = ("prompts", "rollout", "reward", "sampling")
    times = {n.node: n.time_s * (2 if n.node in inner else 1) for n in ROUNDS_PLAN.nodes}
    assert flagged(ROUNDS_PLAN, {**metrics(times), "sampling.rounds": 2.0 * NUM_ROUNDS}) == []
    assert "rollout" in flagged(ROUNDS_PLAN, {**metrics(times), "sampling.rounds": 1.0 * NUM_ROUNDS})


def metrics(times: dict[str, float]) -> dict[str, float]:
    """A line of metrics.jsonl, of which these matter here."""
    return {f"time_s.{name}": seconds for name, seconds in times.items()}


def flagged(plan: Plan, line: dict[str, float]) -> list[str]:
    rows = measured_text(plan, [line]).splitlines()
    return [row.split()[0] for row in rows if row.endswith("!") and not row.startswith("sum")]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_numbers_are_never_cut(width: int) -> None:
    text = plan_text(PLAN, width)
    for node in NODE_PLANS:
        assert units.seconds(node.time_s) in text
    for edge in EDGES:
        if edge.kind == "weights" or edge.collective != "alias":
            assert units.size(edge.size_bytes) in text and units.seconds(edge.time_s) in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_asked(width: int) -> None:
    assert max(map(len, plan_text(PLAN, width).splitlines())) <= width


def test_critical_path_is_connected_and_ends_last() -> None:
    path = critical_path(PLAN)
    assert path[-1] == max(NODE_PLANS, key=lambda n: n.start_s + n.time_s).node
    assert path[0] in [n for n, degree in GRAPH.dag().in_degree if degree == 0]
    on_devices = nx.DiGraph(GRAPH.dag())
    on_devices.add_edge("reward", "ref_logprobs")  # both run on devices 4-7
    assert nx.is_path(on_devices, list(path))


def test_names_shrink_before_anything_else() -> None:
    lines = table((("name", "left"), ("n", "right")), [("a" * 30, "1,234,567")], 25).splitlines()
    assert lines[1] == "a" * 13 + "…  1,234,567"
    assert len(table((("n", "right"),), [("1" * 40,)], 10).splitlines()[1]) == 40


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "-"),
        (0.0002, "<1 ms"),
        (0.0123, "12 ms"),
        (0.0997, "0.10 s"),
        (0.194, "0.19 s"),
        (14.04, "14.0 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "-"), (512, "512 B"), (3_100_000, "3.1 MB"), (15_231_233_024, "15.2 GB")]
)
def test_size(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (1234, "1,234"), (16_700, "16.7 k"), (1_234_567, "1.23 M")]
)
def test_count(value: float, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(("value", "text"), [(42, "42.0 s"), (1240, "20 min 40 s"), (11_100, "3 h 5 min")])
def test_duration(value: float, text: str) -> None:
    assert units.duration(value) == text
