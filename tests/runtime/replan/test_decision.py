"""Whether another plan pays: closed forms, and what must hold for all numbers."""

from __future__ import annotations

from math import isclose
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hflow
from hflow.graph.lengths import Lengths
from hflow.runtime.replan.decision import (
    StepTimes,
    expected_step_s,
    moved_share,
    pays,
    planned_lengths_of,
    warm_up_s,
)

SECONDS = st.floats(1e-4, 1e4)
NODES = st.dictionaries(st.sampled_from("abcdef"), SECONDS, min_size=1)
TIMES = st.builds(StepTimes, SECONDS, NODES)


def lengths(mean: float, **quantiles: float) -> Lengths:
    return Lengths(mean, 1000, tuple(quantiles.items()))


def test_two_nodes_by_hand() -> None:
    """The model says that a step goes from 3 s to 2 s; generation, which it takes to be faster by half, was
    measured to take twice what was predicted: 8 of 7 parts of what was measured are expected to be saved."""
    old = StepTimes(3.0, {"rollout": 2.0, "train": 1.0})
    new = StepTimes(2.0, {"rollout": 1.0, "train": 1.0})
    measured = StepTimes(5.0, {"rollout": 4.0, "train": 1.0})
    assert expected_step_s(old, new, measured) == pytest.approx(5.0 * (2 / 3) * (3 / 2) / (5 / 3))
    assert expected_step_s(old, new, measured) == pytest.approx(3.0), "4/2 + 1: each node as it was off"


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(SECONDS, SECONDS, SECONDS), min_size=1))
def test_of_nodes_one_after_the_other_each_is_corrected_by_itself(
    nodes: dict[str, tuple[float, float, float]],
) -> None:
    old, new, seen = ({name: times[i] for name, times in nodes.items()} for i in range(3))
    sums = (StepTimes(sum(each.values()), each) for each in (old, new, seen))
    expected = sum(seen[name] * new[name] / old[name] for name in nodes)
    assert isclose(expected_step_s(*sums), expected, rel_tol=1e-9)


@given(TIMES, TIMES)
def test_the_same_plan_takes_what_was_measured(old: StepTimes, measured: StepTimes) -> None:
    assert isclose(expected_step_s(old, old, measured), measured.step_s, rel_tol=1e-9)


@given(TIMES, TIMES, TIMES, st.floats(0.1, 10))
def test_a_machine_of_another_speed_changes_all_alike(
    old: StepTimes, new: StepTimes, measured: StepTimes, speed: float
) -> None:
    slower = StepTimes(measured.step_s * speed, {name: s * speed for name, s in measured.nodes.items()})
    both = expected_step_s(old, new, measured), expected_step_s(old, new, slower)
    assert isclose(both[0] * speed, both[1], rel_tol=1e-6)


def test_without_times_of_nodes_the_model_alone_counts() -> None:
    old, new = StepTimes(4.0, {"a": 4.0}), StepTimes(1.0, {"a": 1.0})
    assert expected_step_s(old, new, StepTimes(8.0, {"b": 1.0})) == 2.0


def test_more_than_twice_the_cost_must_be_saved() -> None:
    assert not pays(2.0, 1.0, 10, 5.0, 2.0), "10 s for 5 s is not more than twice"
    assert pays(2.0, 1.0, 11, 5.0, 2.0)
    assert not pays(1.0, 2.0, 10, 0.0, 2.0) and not pays(1.0, 1.0, 10, 0.0, 0.0)
    assert not pays(2.0, 1.0, 0, 0.0, 0.0), "no step is left"


@given(SECONDS, SECONDS, st.integers(0, 10**6), SECONDS, st.floats(0, 10))
def test_what_pays_pays_with_more_steps_and_less_cost(
    old_s: float, new_s: float, left: int, cost_s: float, gain: float
) -> None:
    if pays(old_s, new_s, left, cost_s, gain):
        assert pays(old_s, new_s, left + 1, cost_s / 2, gain) and new_s < old_s
        assert not pays(new_s, old_s, left, cost_s, gain), "never there and back"


def test_what_has_moved() -> None:
    assert moved_share({"a": lengths(100)}, {"a": lengths(130)}) == pytest.approx(0.3)
    assert moved_share({"a": lengths(100)}, {"a": lengths(70)}) == pytest.approx(0.3)
    both = {"a": lengths(100, p50=50, p95=200)}, {"a": lengths(100, p50=50, p95=300)}
    assert moved_share(*both) == pytest.approx(0.5), "the tail alone"
    assert moved_share({"a": lengths(100)}, {"a": lengths(100, p50=1, p95=900)}) == 0, (
        "a mean alone is stated"
    )
    assert moved_share({"a": lengths(2)}, {"a": lengths(3)}) == 0, "one token"
    assert moved_share({"a": lengths(100)}, {"b": lengths(500)}) == 0 == moved_share({}, {})
    two = {"a": lengths(100), "b": lengths(10)}
    assert moved_share(two, {"a": lengths(100), "b": lengths(20)}) == 1.0, "the one that moved most"


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_lengths_that_stay_have_not_moved(mean: float, p50: float) -> None:
    assert moved_share({"a": lengths(mean, p50=p50)}, {"a": lengths(mean, p50=p50)}) == 0


def test_a_graph_that_states_nothing_is_planned_for_the_greatest_lengths(tiny_model: Path) -> None:
    file, said = "tests/runtime/grpo_small.yaml", [f"params.model={tiny_model}"]
    planned = planned_lengths_of(hflow.load(file, said))
    assert {name: (own.mean, own.greatest) for name, own in planned.items()} == {
        "prompts": (8, 8),
        "rollout": (6, 6),
    }
    stated = hflow.load(file, [*said, "nodes.rollout.lengths.mean=3"])
    assert planned_lengths_of(stated)["rollout"].mean == 3


def test_the_first_step_warms_up() -> None:
    assert warm_up_s([5.0, 1.0, 2.0, 1.0]) == 4.0
    assert warm_up_s([1.0, 2.0]) == 0.0 and warm_up_s([3.0]) == 0.0 == warm_up_s([])
