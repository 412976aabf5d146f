"""Of the engines that a generate node may run on, those with which a step is shortest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hflow.compiler.engines import NodeEngines
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.diagnostics import HflowError
from hflow.plan.plan import Plan, Search, TriedEngines
from hflow.plan.verify.runnable import unrunnable

ROUNDING = 1e-9  # of steps that are added up in another order


def cheapest(choices: Sequence[NodeEngines], planned: Callable[[NodeEngines], Plan]) -> Plan:
    """The plan with the shortest step of those that `planned` makes with each of `choices`; the first of
    equal ones. What an engine cannot run counts only where no other can. The search tells what was tried.

    Raises:
        HflowError: of the first choice, where there is a plan with none.
    """
    if len(choices) == 1:
        return planned(choices[0])
    outcomes = [_outcome(engines, planned) for engines in choices]
    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    if not plans:
        raise next(outcome for outcome in outcomes if isinstance(outcome, HflowError))
    best = min(plans, key=lambda plan: (len(unrunnable(plan)), plan.step_time_s))
    tried = tuple(_tried(engines, outcome, best) for engines, outcome in zip(choices, outcomes, strict=True))
    return replace(best, search=replace(proven(best, plans), tried_engines=tried))


def _outcome(engines: NodeEngines, planned: Callable[[NodeEngines], Plan]) -> Plan | HflowError:
    try:
        return planned(engines)
    except HflowError as error:
        return error


def _tried(engines: NodeEngines, outcome: Plan | HflowError, best: Plan) -> TriedEngines:
    pairs = tuple(engines.items())
    if isinstance(outcome, HflowError):
        return TriedEngines(pairs, None, outcome.diagnostics[0].message)
    more = [found for found in unrunnable(outcome) if found not in unrunnable(best)]
    return TriedEngines(pairs, outcome.step_time_s, more[0].message if more else "")


def proven(best: Plan, plans: Sequence[Plan]) -> Search:
    """What is proven of the best of several searches: no plan is shorter than the lowest of their bounds.
    Where one of them proves nothing, or had a shorter plan that could not be run, others may be shorter."""
    explored = sum(plan.search.explored for plan in plans)
    searches = [plan.search for plan in plans]
    unproven = next((search for search in searches if search.gap is None), None)
    if unproven:
        told = replace(best.search, unsearched=unproven.unsearched, try_pin=unproven.try_pin)
        return replace(told, explored=explored, gap=None, bound_s=0.0)
    bound_s, step_s = min(search.bound_s for search in searches), best.step_time_s
    if any(plan.step_time_s < step_s * (1 - RESOLUTION) for plan in plans):
        return replace(best.search, explored=explored, gap=None, bound_s=0.0)
    gap = proven_gap(bound_s, step_s)
    return replace(best.search, explored=explored, gap=gap, bound_s=bound_s, searched_gap=gap)


def proven_gap(bound_s: float, step_s: float) -> float:
    """By what part a step may be too long where none takes less than `bound_s`; 0 below the resolution."""
    return 1 - bound_s / step_s if bound_s < step_s * (1 - RESOLUTION - ROUNDING) else 0.0
