"""Planning in a thread of its own, while the steps of a run go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hflow.diagnostics import HflowError
from hflow.graph.lengths_file import SeenLengths
from hflow.plan.plan import Plan

# The graph of a plan with the lengths that a run saw: planned as it was, if that is possible, and anew.
PlanForLengths = Callable[[Plan, Mapping[str, SeenLengths]], tuple[Plan | None, Plan]]


@dataclass(frozen=True)
class FoundPlan:
    """`old` is the present plan at the lengths that were seen, `new` the best one; `problem`: why there are
    none."""

    old: Plan | None
    new: Plan | None
    seconds: float
    problem: str = ""


class PlanSearch:
    """Begun when it is made. Nobody waits for it: a run that ends leaves it behind."""

    def __init__(self, make: PlanForLengths, plan: Plan, seen: Mapping[str, SeenLengths]):
        self._found: FoundPlan | None = None
        self._thread = threading.Thread(target=self._search, args=(make, plan, seen), daemon=True)
        self._thread.start()

    @property
    def found(self) -> FoundPlan | None:
        """None before it has ended."""
        return self._found

    def _search(self, make: PlanForLengths, plan: Plan, seen: Mapping[str, SeenLengths]) -> None:
        began = time.perf_counter()
        try:
            old, new = make(plan, seen)
        except HflowError as error:
            self._found = FoundPlan(None, None, time.perf_counter() - began, error.diagnostics[0].message)
        except Exception as error:  # a defect of the planner ends no run that has a plan
            problem = f"{type(error).__name__}: {error}"
            self._found = FoundPlan(None, None, time.perf_counter() - began, problem)
        else:
            self._found = FoundPlan(old, new, time.perf_counter() - began)
