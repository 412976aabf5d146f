"""The best choice that the search has priced so far, and how much more it may try."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.effort import EDGE_PAIR, ORDERS, PRICE
from hflow.compiler.planner.full_assignment import FullAssignment, fastest_configs
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.step import Configs, tasks_of_step
from hflow.schedule.list_scheduling import arrange
from hflow.schedule.moves import WORTH
from hflow.schedule.random_search import searched
from hflow.schedule.task_times import busiest_s, period_s

SHORTER = 0.1  # by what part of itself a step may become shorter in an order that is searched longer for,
TOLD = 10  # until so many have been
RESOLUTION = 1e-3  # steps that differ by less count as equally long: predictions are not that good


@dataclass
class Incumbent:
    """The best choice so far. `explored`: choices that were priced; `effort`: what the search has taken by
    `effort.py`, of which there may be `most`, until the `deadline`; more `until_found` something, if that is
    asked for. `gains`: by what parts of themselves steps became shorter in orders that were searched longer
    for."""

    space: SearchSpace
    deadline: float = float("inf")
    resolution: float = RESOLUTION
    choice: FullAssignment | None = None
    explored: int = 0
    effort: int = 0
    most: float = float("inf")
    until_found: bool = True
    gains: list[float] = field(default_factory=list[float])

    @property
    def limit_s(self) -> float:
        """Whatever takes at least so long need not be looked at."""
        return self.choice.step_s * (1 - self.resolution) if self.choice else self.space.draft.below_s

    @cached_property
    def price(self) -> int:
        """Effort of pricing one choice."""
        draft = self.space.draft
        edges = len(tuple(draft.graph.edges())) + len(draft.weight_edges)
        return max(PRICE, EDGE_PAIR * edges**2)

    @property
    def late(self) -> bool:
        """Whether the budget is spent, and there is something to show for it if there must be."""
        spent = self.effort > self.most or time.monotonic() > self.deadline
        must_find = self.until_found and self.space.draft.below_s == float("inf")
        return spent and (self.choice is not None or not must_find)

    def offer(self, assignments: Mapping[str, Assignment]) -> None:
        """Price a complete choice, and keep it if it fits and is the best; nothing, if models that share a
        base lie otherwise than each other."""
        if not self.space.lie_alike(assignments):
            return
        configs = fastest_configs(self.space, assignments)
        if configs is None:
            return
        seconds = self._step_s(assignments, configs)
        if seconds < (self.choice.step_s if self.choice else self.limit_s):
            self.choice = FullAssignment(dict(assignments), configs, seconds)

    def _step_s(self, assignments: Mapping[str, Assignment], configs: Configs) -> float:
        """Seconds per step of a long run. Where an order that is searched longer for cannot make it the best,
        those in one that is found soon."""
        self.explored += 1
        self.effort += self.price
        tasks = tasks_of_step(self.space.builder, self.space.groups, assignments, configs)
        order = arrange(tasks)
        seconds = period_s(tasks, order)
        if seconds <= busiest_s(tasks) * (1 + WORTH) or seconds * (1 - self._shorter) >= self.limit_s:
            return seconds
        self.effort += ORDERS * self.price
        found_s = period_s(tasks, searched(tasks, order))
        self.gains.append(1 - found_s / seconds)
        return found_s

    @property
    def _shorter(self) -> float:
        """By what part of itself a step may become shorter in an order that is searched longer for: as much
        as one has so far, once that is known."""
        return max(self.gains) if len(self.gains) >= TOLD else SHORTER
