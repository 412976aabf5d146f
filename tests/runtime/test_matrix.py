"""Every plan of PPO and of GRPO gives the trajectory of one worker: a covering of all pairs of choices."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from hflow.plan.program import Program, SyncWeights
from hflow.runtime.run import Run
from tests.runtime.matrix import FACTORS, STEPS, TRAINERS, Case, Matrix, allowed, cases
from tests.runtime.pairwise import covering

pytestmark = pytest.mark.slow
CASES = cases()


def losses(run: Run, algorithm: str) -> dict[str, list[float]]:
    return {node: [line[f"loss.{node}"] for line in run.metrics] for node in TRAINERS[algorithm]}


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_one_worker_learns_something(matrix: Matrix, algorithm: str) -> None:
    """What is compared below is no run in which nothing happens."""
    run = matrix.one(algorithm).run
    assert len({line["digest.rollout"] for line in run.metrics}) == STEPS
    for node, values in losses(run, algorithm).items():
        assert all(line[f"{node}.grad_norm"] > 1e-3 for line in run.metrics), node
        assert any(abs(loss) > 1e-4 for loss in values), node


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_trajectory(matrix: Matrix, case: Case) -> None:
    """Tokens are equal, losses within 1e-5 relative. An actor's loss is a difference of advantages that
    cancel, so 1e-5 is relative to the larger of the loss and 1e-2, the size of what cancels."""
    one, run = matrix.one(case.algorithm).run, matrix.run(case)
    for mine, theirs in zip(run.metrics, one.metrics, strict=True):
        assert mine["digest.rollout"] == theirs["digest.rollout"]
        assert mine["tokens"] == theirs["tokens"]
        for node in TRAINERS[case.algorithm]:
            assert mine[f"loss.{node}"] == pytest.approx(theirs[f"loss.{node}"], rel=1e-5, abs=1e-7), node
            norm = f"{node}.grad_norm"
            assert mine[norm] == pytest.approx(theirs[norm], rel=1e-4), node
    assert run.evaluations == pytest.approx(one.evaluations, rel=1e-5)


def test_trainers_donate_their_memory_in_some_of_them(matrix: Matrix) -> None:
    """So that what is equal includes weights that were given up while a copy was there."""
    programs = [(case, p) for case in CASES for p in (matrix.plan(case).step, matrix.plan(case).evaluation)]
    donating = [(case, p) for case, p in programs if p and _donates(p)]
    assert {case.algorithm for case, _ in donating} == {*TRAINERS}
    assert len({case.train for case, _ in donating}) > 2


def _donates(program: Program) -> bool:
    return any(isinstance(i, SyncWeights) and i.donates for i in program.instructions)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_the_case(matrix: Matrix, case: Case) -> None:
    """Nothing that a case says is left to the planner."""
    plan = matrix.plan(case)
    for node, layout in case.layouts.items():
        sizes = {axis: size for axis, size in plan.node(node).mesh.axes if size > 1}
        assert sizes == {word[:2]: int(word[2:]) for word in layout.split(",") if word[2:] != "1"}, node
    meshes = [set(plan.node(node).mesh.devices) for node in ("actor_train", "rollout")]
    assert meshes[0].isdisjoint(meshes[1]) == (case.placement in ("standalone", "hybrid"))
    trained = plan.node("actor_train").strategy
    assert (trained.zero, trained.recompute) == (
        int(case.strategy == "zero1"), "full" if case.strategy == "recompute" else "none"
    )  # fmt: skip


def test_every_pair_of_choices_is_a_case() -> None:
    """Counted anew: of any two factors, every two values that go together at all."""
    assert len(CASES) >= 24
    every = [dict(zip(FACTORS, values)) for values in product(*FACTORS.values())]
    possible = [values for values in every if allowed(values)]
    for a, b in combinations(FACTORS, 2):
        covered = {(getattr(case, a), getattr(case, b)) for case in CASES}
        assert covered == {(values[a], values[b]) for values in possible}, (a, b)


def test_a_covering_is_small_and_keeps_to_what_is_allowed() -> None:
    factors: dict[str, Any] = {name: range(3) for name in "abcd"}
    found = covering(factors, lambda case: case["a"] != case["b"])
    assert all(case["a"] != case["b"] for case in found)
    assert {(case["a"], case["b"]) for case in found} == {
        (x, y) for x in range(3) for y in range(3) if x != y
    }
    for x, y in (pair for pair in combinations("abcd", 2) if pair != ("a", "b")):
        assert len({(case[x], case[y]) for case in found}) == 9
    assert len(found) <= 15, "9 pairs of two factors at least, 81 - 27 cases at most"
