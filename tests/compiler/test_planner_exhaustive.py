"""Branch and bound finds what enumeration finds: random graphs, shapes, clusters, placements and pins."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest

from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.planner.search import SearchResult, exhaustive, search
from hflow.compiler.state import Draft
from tests.compiler.small_cases import GRAPHS, case, num_plans, scarce_case, space_of

PER_GRAPH = 20  # x 14 graphs = 280 cases
FOREVER = float("inf")


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PER_GRAPH))
@pytest.mark.parametrize("name", GRAPHS)
def test_search_finds_the_best_of_all_plans(name: str, seed: int) -> None:
    """About one case in five fits nowhere: then both say so."""
    _compare(case(name, seed, most=1500), seed)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PER_GRAPH))
@pytest.mark.parametrize("name", ["ppo", "safe_rlhf", "async_grpo"])
def test_search_finds_the_best_of_plans_with_shared_forward_passes(name: str, seed: int) -> None:
    draft = case(name, seed, most=1500, shares_forward=True)
    assert draft.sharing
    _compare(draft, seed)


def test_who_comes_first_stays_where_a_pin_names_devices() -> None:
    """The trainer is on the second host; with the critic first, the rollout would be there, too, as it is in
    no allocation of the space."""
    draft = case("ppo", 2, most=1500)
    assert [pin.text for pin in draft.pins] == ["actor_train=@4-7"]
    _compare(draft, 2)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PER_GRAPH // 2))
@pytest.mark.parametrize("name", GRAPHS)
def test_a_search_cut_short_proves_no_more_than_is_true(name: str, seed: int) -> None:
    """After any effort; and what it says of the gap is what it has proven."""
    draft = case(name, seed, most=1500)
    expected = exhaustive(space_of(draft)).choice
    for effort in (0, 2_000, 20_000) if expected else ():
        found = search(space_of(draft), None, most=effort)
        assert expected and found.choice
        assert 0 < found.bound_s <= expected.step_s * (1 + 1e-9), effort
        assert found.gap in (0.0, 1 - found.bound_s / found.choice.step_s)


@pytest.mark.rotating(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "remax", "async_grpo", "dapo"])
def test_search_finds_the_best_of_many_plans(name: str) -> None:
    for seed in range(100, 103):
        _compare(case(name, seed, most=20_000), seed)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PER_GRAPH // 2))
@pytest.mark.parametrize("name", GRAPHS)
def test_search_finds_what_just_fits(name: str, seed: int) -> None:
    """Where hardly more than the least memory is there, donation often decides what fits."""
    _compare(scarce_case(name, seed, most=1500), seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "grpo", "safe_rlhf", "dapo"])
def test_donation_decides_in_some_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = [scarce_case(name, seed, most=1500) for seed in range(PER_GRAPH // 2)]
    with_it = [exhaustive(space_of(draft)) for draft in drafts]
    monkeypatch.setattr("hflow.compiler.planner.weight_syncs.may_donate", lambda *_: False)
    without = [exhaustive(space_of(draft)) for draft in drafts]
    assert any(not _same(*each, 1e-9) for each in zip(with_it, without))
    pairs = [(a.choice, b.choice) for a, b in zip(with_it, without)]
    assert all(b is None or (a and a.step_s <= b.step_s) for a, b in pairs)


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_the_cases_are_worth_comparing() -> None:
    """Most have many plans, some fit nowhere, and in some only few of the plans fit."""
    cases = [case(name, seed, 1500) for name in ("ppo", "grpo", "async_grpo") for seed in range(PER_GRAPH)]
    counted = [(num_plans(draft, 1500), exhaustive(space_of(draft))) for draft in cases]
    assert sum(total > 100 for total, _ in counted) > len(cases) / 3
    assert 0 < sum(found.choice is None for _, found in counted) < len(cases) / 3
    assert any(found.choice and found.explored < total / 2 for total, found in counted)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["ppo", "async_grpo", "dapo"])
def test_who_listens_is_told_how_many_plans_of_how_many(name: str, seed: int) -> None:
    """From none to all that there are, in steps; and it changes nothing."""
    draft, told = case(name, seed, most=1500), list[tuple[int, int]]()
    options = replace(draft.options, on_priced=lambda *counts: told.append(counts))
    heard = exhaustive(space_of(replace(draft, options=options)))
    total = num_plans(draft, 1500)
    assert told == [*((priced, total) for priced in range(0, total, 100)), (total, total)]
    assert heard.choice == (without := exhaustive(space_of(draft))).choice
    assert heard.explored == without.explored <= total


def _compare(draft: Draft, seed: int) -> None:
    expected, proven = exhaustive(space_of(draft)), search(space_of(draft), FOREVER, resolution=0.0)
    assert _same(expected, proven, 1e-9), (draft.graph.name, seed)
    close = search(space_of(draft), FOREVER)
    assert _same(expected, close, RESOLUTION), (draft.graph.name, seed)


def _same(expected: SearchResult, found: SearchResult, tolerance: float) -> bool:
    if expected.choice is None or found.choice is None:
        return expected.choice is found.choice
    return isclose(found.choice.step_s, expected.choice.step_s, rel_tol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"), [("grpo", ()), ("async_grpo", ()), ("tool_grpo", ()), ("dapo", ("params.draw=2",))]
)
def test_search_finds_the_best_where_replicas_share_prompts(name: str, more: tuple[str, ...]) -> None:
    """Two prompts of eight samples, on two to eight devices: in some cases more replicas than prompts are
    best."""
    shared = 0
    for seed in range(PER_GRAPH // 2):
        draft = case(name, seed, 1500, ("params.batch=2", "params.minibatch=16", *more))
        _compare(draft, seed)
        best = search(space_of(draft), FOREVER).choice
        rollout = next(g for g in space_of(draft).groups if g.role == "generate")
        shared += best is not None and best.assignments[rollout.name].candidate.dp > 2
    assert shared
