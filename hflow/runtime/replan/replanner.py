"""When a run plans again, and under which plan it goes on: asked between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hflow.graph.lengths import Lengths
from hflow.graph.lengths_file import SeenLengths
from hflow.graph.run_config import ReplanPolicy
from hflow.plan.node_plan import NodePlan
from hflow.plan.parameters import num_parameters
from hflow.plan.plan import Plan
from hflow.plan.run_state import trained_models
from hflow.runtime.controller.deadlines import BYTES_PER_S
from hflow.runtime.controller.seen_lengths import LengthCounts
from hflow.runtime.replan.decision import (
    StepTimes,
    expected_step_s,
    moved_share,
    pays,
    planned_lengths_of,
    warm_up_s,
)
from hflow.runtime.replan.search import FoundPlan, PlanForLengths, PlanSearch

TRAINED_BYTES = 12  # of a parameter: its weights and two moments
Layouts = tuple[NodePlan, ...]
NODE_TIME = "time_s."  # begins the columns of metrics.jsonl with the seconds of nodes


@dataclass(frozen=True)
class NewPlan:
    """A plan to go on under. `old_s`: what a step takes under the present one, `new_s`: what is expected
    under this one; `predicted_old_s`, `predicted_new_s`: by the cost model alone. `cost_s`: what
    switching is expected to take."""

    plan: Plan
    old_s: float
    new_s: float
    predicted_old_s: float
    predicted_new_s: float
    cost_s: float


class Replanner:
    """Of one run, over all its plans.

    Args:
        make: plans for lengths that were seen.
        event: records what was planned.
    """

    def __init__(self, policy: ReplanPolicy, make: PlanForLengths, event: Callable[..., None]):
        self._policy, self._make, self._event = policy, make, event
        self._refused: list[Layouts] = []  # those that could not be loaded
        self._switch_s: float | None = None  # of the last switch, without the first step after it

    def begin(self, plan: Plan, load_s: float, switch_s: float | None = None) -> None:
        """The run goes on under `plan`, whose models were loaded in `load_s`. `switch_s`: what it has taken
        to go over to it, where another came before."""
        self._plan, self._load_s = plan, load_s
        self._switch_s = switch_s if switch_s is not None else self._switch_s
        self._reference: Mapping[str, Lengths] = planned_lengths_of(plan.graph)
        self._steps = self._looked = 0
        self._first_s = 0.0
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=self._policy.every)
        self._lengths: deque[Sequence[Mapping[str, Any]]] = deque(maxlen=self._policy.every)
        self._search: PlanSearch | None = None
        self._measured = StepTimes(0.0, {})
        self._cost_s = 0.0

    def add(self, metrics: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> None:
        """A step that has ended: its line of ``metrics.jsonl``, and what workers tell of lengths."""
        if self._steps == 0:
            self._first_s = metrics["time_s"]
        else:
            self._recent.append(metrics)
        self._steps += 1
        self._lengths.append([{"lengths": report["lengths"]} for report in reports])

    def plan_after(self, done: int) -> NewPlan | None:
        """The plan to go on under after `done` steps, if there is one. Otherwise begins to look for one where
        it is time, and lengths have moved."""
        if self._search is None:
            self._look()
            return None
        found = self._search.found
        if found is None:
            return None
        self._search = None
        return self._chosen(found, done)

    @property
    def is_looking(self) -> bool:
        """Whether a plan is being looked for."""
        return self._search is not None and self._search.found is None

    def refuse(self, plan: Plan) -> None:
        """Never choose this one again, for whatever lengths it is made."""
        self._refused.append(_layouts(plan))

    @property
    def cost_s(self) -> float:
        """What switching takes: as it was measured last, else as much as it took to load the first plan, and
        to write and read what is trained. The first step under a plan takes longer, which is counted, too."""
        warm_s = warm_up_s([self._first_s, *(line["time_s"] for line in self._recent)])
        if self._switch_s is not None:
            return self._switch_s + warm_s
        return self._load_s + warm_s + 2 * self.state_bytes / BYTES_PER_S

    @property
    def state_bytes(self) -> int:
        """About what the state takes: weights and moments of what is trained."""
        shapes = (self._plan.shapes[model] for model in trained_models(self._plan.graph))
        return TRAINED_BYTES * sum(map(num_parameters, shapes))

    def _look(self) -> None:
        if self._steps - self._looked < self._policy.every or not self._recent:
            return
        self._looked = self._steps
        seen = self._seen()
        lengths = {name: own.lengths for name, own in seen.items()}
        if moved_share(self._reference, lengths) <= self._policy.moved:
            return
        self._reference = {**self._reference, **lengths}
        self._measured, self._cost_s = self._times(), self.cost_s
        self._search = PlanSearch(self._make, self._plan, seen)

    def _seen(self) -> dict[str, SeenLengths]:
        """By the last steps."""
        counts = LengthCounts()
        for reports in self._lengths:
            counts.add(reports)
        return counts.seen(self._plan.graph)

    def _times(self) -> StepTimes:
        """Medians over the last steps, without the first under the plan. They are taken before planning
        begins, which may take cores from workers."""
        names = {name for line in self._recent for name in line if name.startswith(NODE_TIME)}
        of_nodes = {
            name.removeprefix(NODE_TIME): median(line.get(name, 0.0) for line in self._recent)
            for name in names
        }
        return StepTimes(median(line["time_s"] for line in self._recent), of_nodes)

    def _chosen(self, found: FoundPlan, done: int) -> NewPlan | None:
        """Tell what was found, and whether it pays."""
        if found.new is None or found.old is None:
            problem = found.problem or "the present plan does not fit these lengths"
            self._event("planned", step=done, search_s=found.seconds, problem=problem)
            return None
        old, new = StepTimes.predicted(found.old), StepTimes.predicted(found.new)
        old_s, left = self._measured.step_s, self._plan.graph.steps - done
        new_s = expected_step_s(old, new, self._measured)
        is_chosen = pays(old_s, new_s, left, self._cost_s, self._policy.gain)
        is_chosen = is_chosen and _layouts(found.new) not in (_layouts(self._plan), *self._refused)
        figures = {"old_s": old_s, "new_s": new_s, "cost_s": self._cost_s, "search_s": found.seconds}
        self._event("planned", step=done, plan=found.new.hash, chosen=is_chosen, **figures)
        if not is_chosen:
            return None
        return NewPlan(found.new, old_s, new_s, old.step_s, new.step_s, self._cost_s)


def _layouts(plan: Plan) -> Layouts:
    """What a plan decides, without what it predicts."""
    return tuple(replace(node, start_s=0.0, time_s=0.0, memory_bytes=0) for node in plan.all_nodes)
