"""When a run looks at its lengths, when it plans, and what it then goes on under: without workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.lengths_file import SeenLengths
from hflow.graph.run_config import ReplanPolicy
from hflow.plan.plan import Plan
from hflow.runtime.replan.replanner import NewPlan, Replanner

EVERY, STEPS, LOAD_S = 4, 100, 3.0
FAST, SLOW = 0.5, 1.0  # seconds of a step
Answer = tuple[Plan | None, Plan] | Exception


@pytest.fixture(scope="module")
def plans(tiny_model: Path) -> tuple[Plan, Plan]:
    """Of one graph, for responses of 2 tokens, on two sets of devices."""
    said = [f"params.model={tiny_model}", f"params.steps={STEPS}", "nodes.rollout.lengths.mean=2"]
    graph = hflow.load("tests/runtime/grpo_small.yaml", [*said, "nodes.rollout.with.max_new_tokens=50"])
    return hflow.compile(graph, "local4", "actor_train=dp2@0-1"), hflow.compile(
        graph, "local4", "actor_train=tp2@0-1"
    )


class Steps:
    """A run of `plans[0]` whose steps take a second; planning promises that they take half of one."""

    def __init__(self, plans: tuple[Plan, Plan], policy: ReplanPolicy, answer: Answer | None = None):
        self.old, self.new = plans
        self.asked: list[Mapping[str, SeenLengths]] = []
        self.events: list[dict[str, Any]] = []
        self._answer = answer or self.prices(self.old, self.new)
        self.replanner = Replanner(policy, self._make, lambda kind, **fields: self.events.append(fields))
        self.replanner.begin(self.old, LOAD_S)
        self.done = 0

    @staticmethod
    def prices(old: Plan, new: Plan) -> tuple[Plan, Plan]:
        """Alike in all nodes, so that nothing is corrected."""
        same = {node.node: node.time_s for node in old.nodes}
        nodes = tuple(replace(node, time_s=same[node.node]) for node in new.nodes)
        return replace(old, step_time_s=SLOW), replace(new, step_time_s=FAST, nodes=nodes)

    def _make(self, plan: Plan, seen: Mapping[str, SeenLengths]) -> tuple[Plan | None, Plan]:
        self.asked.append(seen)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def step(self, tokens: int, seconds: float = SLOW) -> NewPlan | None:
        """The plan to go on under after one more step, with 64 responses of so many tokens."""
        self.replanner.add({"time_s": seconds}, [{"lengths": {"rollout": {tokens: 64}}}])
        self.done += 1
        chosen = self.replanner.plan_after(self.done)
        while self.replanner.is_looking:
            time.sleep(0.001)
        return chosen

    def steps(self, tokens: list[int]) -> list[int]:
        """After how many of these a plan was chosen."""
        return [number for number, each in enumerate(tokens, 1) if self.step(each)]


def test_lengths_that_stay_are_never_planned_for(plans: tuple[Plan, Plan]) -> None:
    run = Steps(plans, ReplanPolicy(EVERY, gain=0))
    assert run.steps([2] * 50) == [] and run.asked == [] == run.events


def test_it_looks_after_so_many_steps_and_switches_after_the_next(plans: tuple[Plan, Plan]) -> None:
    run = Steps(plans, ReplanPolicy(EVERY, gain=0))
    assert run.steps([20] * (EVERY + 1)) == [EVERY + 1]
    (seen,) = run.asked
    assert seen["rollout"].rows == EVERY * 64 and seen["rollout"].lengths.mean == 20
    assert run.events[0]["chosen"] and run.events[0]["old_s"] == SLOW
    assert run.events[0]["new_s"] == pytest.approx(FAST)


def test_what_was_planned_for_in_vain_is_not_planned_for_again(plans: tuple[Plan, Plan]) -> None:
    run = Steps(plans, ReplanPolicy(EVERY, gain=1e6))
    assert run.steps([20] * 40) == [] and len(run.asked) == 1
    assert run.steps([23] * 20) == [] and len(run.asked) == 1, "a sixth is not enough"
    assert run.steps([40] * 20) == [] and len(run.asked) == 2
    assert [event["chosen"] for event in run.events] == [False, False]


def test_the_cost_is_first_estimated_and_then_measured(plans: tuple[Plan, Plan]) -> None:
    """The first step takes 7 s, which is 6 s more than the others: so it will after a switch."""
    run = Steps(plans, ReplanPolicy(EVERY, gain=2))
    run.step(2, 7.0)
    run.steps([2] * 5)
    assert run.replanner.cost_s == pytest.approx(LOAD_S + 6.0, rel=0.01), "and little state"
    left = STEPS - run.done
    assert left * (SLOW - FAST) > 2 * run.replanner.cost_s
    assert run.steps([20] * 8), "so it pays"
    run.replanner.begin(run.new, 0.1, switch_s=1.5)
    for seconds in (2.0, 0.5, 0.5, 0.5):
        run.step(20, seconds)
    assert run.replanner.cost_s == pytest.approx(1.5 + 1.5)


def test_after_a_switch_it_waits_again(plans: tuple[Plan, Plan]) -> None:
    run = Steps(plans, ReplanPolicy(EVERY, gain=0))
    assert run.steps([20] * (EVERY + 1))
    run.replanner.begin(run.new, LOAD_S, 1.0)
    assert run.steps([20] * (EVERY - 1)) == [] and len(run.asked) == 1
    assert run.step(20) is None and len(run.asked) == 2, "this plan says that responses have 2 tokens, too"
    assert run.step(20) is None, "and is the one that is found"


def test_too_few_steps_are_left(plans: tuple[Plan, Plan]) -> None:
    """Half a second of each is saved, 3 s must be, twice."""
    for done, pays in ((STEPS - 14, True), (STEPS - 10, False)):
        run = Steps(plans, ReplanPolicy(EVERY, gain=2))
        run.done = done - EVERY - 1
        assert bool(run.steps([20] * (EVERY + 1))) == pays


def test_a_plan_that_could_not_be_loaded_is_not_chosen_again(plans: tuple[Plan, Plan]) -> None:
    run = Steps(plans, ReplanPolicy(EVERY, gain=0))
    run.replanner.refuse(run.new)
    assert run.steps([20] * 10) == [] and [event["chosen"] for event in run.events] == [False]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (HflowError(Diagnostic("HF305", "nothing fits")), "nothing fits"),
        (KeyError("rollout"), "KeyError: 'rollout'"),
    ],
)
def test_a_search_that_fails_is_told_and_ends_nothing(
    plans: tuple[Plan, Plan], answer: Exception, problem: str
) -> None:
    run = Steps(plans, ReplanPolicy(EVERY), answer)
    assert run.steps([20] * 10) == []
    assert [(event["problem"], event["step"]) for event in run.events] == [(problem, EVERY + 1)]
