"""Which checkpoint of a run is the best, by a metric of its steps or of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hflow.graph.ir import Graph
from hflow.graph.run_config import CheckpointPolicy


@dataclass(frozen=True)
class Scores:
    """Of the states after so many steps: the `known` values of the metric, and whether that of a state which
    has none `may_come`. It does not where nothing measures it, or a step has not reported it."""

    known: Mapping[int, float]
    may_come: Callable[[int], bool]


NO_SCORES = Scores({}, lambda step: False)


def scores(
    graph: Graph,
    name: str,
    metrics: Sequence[Mapping[str, Any]],
    evaluations: Mapping[int, float],
    evaluated: Mapping[str, Mapping[int, float]],
) -> Scores:
    """By a metric of an evaluation of the state, or by the metric of the step before.

    Args:
        metrics: of the steps that are recorded.
        evaluations: the metric of `eval`, by steps.
        evaluated: those of the named evaluations, by key and steps.
    """
    for own in graph.evaluations:
        if name in own.keys:
            return Scores(evaluated.get(name, {}), partial(own.is_due, steps=graph.steps))
    if graph.evaluation is not None and str(graph.evaluation.metric) == name:
        return Scores(evaluations, partial(graph.evaluation.is_due, steps=graph.steps))
    last = metrics[-1]["step"] + 1 if metrics else 0
    known = {line["step"] + 1: line[name] for line in metrics if line.get(name) is not None}
    return Scores(known, lambda step: step > last)


def best_of(steps: Sequence[int], policy: CheckpointPolicy, scores: Scores) -> int | None:
    """Of these the one with the best score, the first of several; None where no score is known."""
    if not policy.best:
        return None
    choose = max if policy.mode == "max" else min
    scored = sorted(step for step in steps if step in scores.known)
    return choose(scored, key=scores.known.__getitem__, default=None)


def may_be_best(steps: Sequence[int], policy: CheckpointPolicy, scores: Scores) -> set[int]:
    """The best of these, and those whose scores may still come."""
    if not policy.best:
        return set()
    best = best_of(steps, policy, scores)
    coming = {step for step in steps if step not in scores.known and scores.may_come(step)}
    return coming if best is None else {*coming, best}
