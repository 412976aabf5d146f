"""How long an instruction may take before it counts as hung: from what it took before, or is predicted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hflow.graph.run_config import HangPolicy
from hflow.plan.parameters import num_parameters
from hflow.plan.plan import Plan
from hflow.plan.program import Activity, Program, with_bodies
from hflow.runtime.controller.time_taken import time_taken
from hflow.runtime.controller.worker_failure import WorkerReport
from hflow.runtime.worker.whereabouts import Whereabouts

NOTICE = 3  # it is told of at this part of its deadline
QUICK = ("", "leave", "join")  # between calls, or in one in which nothing of a size is done
STATE_BYTES = 16  # of a parameter: its weights twice and two moments
BYTES_PER_S = 1e9  # of what reads or writes all of that

_Key = tuple[bool, str, str]  # of an evaluation or of the step; the kind and the name of its events


@dataclass(frozen=True)
class Usual:
    """Seconds that something took at most, None if it was never measured, and what was predicted."""

    longest_s: float | None
    predicted_s: float

    @property
    def _expected_s(self) -> float:
        return max(self.longest_s or 0.0, self.predicted_s)

    def deadline_s(self, policy: HangPolicy) -> float:
        least_s = policy.first_s if self.longest_s is None else policy.least_s
        return max(least_s, policy.factor * self._expected_s)

    def notice_s(self, policy: HangPolicy) -> float:
        """When to tell that it takes long. What was never measured is told of as if it took what is
        predicted, though it may go on for longer."""
        usual_s = max(policy.least_s, policy.factor * self._expected_s)
        return min(usual_s, self.deadline_s(policy)) / NOTICE


class Durations:
    """What each instruction of a plan took so far."""

    def __init__(self, plan: Plan):
        self._longest: dict[_Key, float] = {}
        self._predicted: dict[_Key, float] = {}
        for program in plan.programs:
            for instruction in with_bodies(program.instructions):
                if isinstance(instruction, Activity):
                    key = program is not plan.step, *program.kind_and_name(instruction)
                    self._predicted[key] = max(self._predicted.get(key, 0.0), instruction.time_s)
        self._whole_s = sum(map(num_parameters, plan.shapes.values())) * STATE_BYTES / BYTES_PER_S

    def learn(self, evaluation: bool, reports: Sequence[WorkerReport]) -> None:
        """From the reports of a step or an evaluation."""
        for (kind, name), seconds in time_taken(reports):
            key = evaluation, kind, name
            self._longest[key] = max(self._longest.get(key, 0.0), seconds)

    def longest(self) -> Usual:
        """Of whatever takes longest."""
        known = [self._longest.get(key) for key in self._predicted]
        measured = [seconds for seconds in known if seconds is not None]
        longest_s = max(measured) if len(measured) == len(known) else None
        return Usual(longest_s, max(self._predicted.values()))

    def usual(self, program: Program | None, at: Whereabouts) -> Usual:
        """Of what a worker does; `program`: None outside of programs."""
        if program is None:
            return Usual(0.0, 0.0) if at.method in QUICK else Usual(None, self._whole_s)
        key = at.evaluation, *program.kind_and_name(program.at(at.path))
        return Usual(self._longest.get(key), self._predicted.get(key, 0.0))
