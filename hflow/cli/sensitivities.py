"""How `hflow compile` tries `--sensitivities` and `--what-if`, and what a terminal shows meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hflow.cli.planning import make_plan
from hflow.compiler.options import PlannerOptions


def try_sensitivities(
    plan: Any, graph: Any, pins: Sequence[str] | None, options: PlannerOptions, tried: Sequence[Any]
) -> tuple[Any, ...]:
    """A row (`hflow.report.sensitivity.SensitivityRow`) for each of some variations of a `graph` and its
    `plan`'s cluster. A terminal is told of each."""
    from rich.console import Console

    from hflow.report.sensitivity import sensitivity

    console, rows = Console(stderr=True), list[Any]()
    for number, variation in enumerate(tried, 1):
        if console.is_terminal:
            text = f"{number}/{len(tried)}  {variation.name}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        rows.append(sensitivity(plan, graph, variation, lambda g, c: make_plan(g, c, pins, options)))
    return tuple(rows)
