"""When tasks run that compete for devices: the one model of time of planner, schedule and views.

A task occupies its resources (numbers, which stand for sets of devices) from its start to its end. A device
does its tasks in one order, the same in every step; a task starts when those before it on all its resources,
and those that it depends on, have ended. Devices do not wait for each other between steps: a step may begin
on some before the last one has ended on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Order = tuple[int, ...]  # numbers of tasks, each after those that it waits for
WARM_UP, MEASURED = 2, 3  # steps: the first fill the pipeline, the others tell how long one takes


@dataclass(frozen=True, slots=True)
class Task:
    """`after`: tasks of the same step that must have ended; their numbers. `sets_up_next`: it is the setup of
    the next task of the list, which alone needs what it makes, and which comes directly after it, unless that
    has to wait for others."""

    time_s: float
    resources: tuple[int, ...]
    after: tuple[int, ...] = ()
    sets_up_next: bool = False


def starts(tasks: Sequence[Task], order: Sequence[int], steps: int = 1) -> list[list[float]]:
    """When each task starts, step by step."""
    free = [0.0] * (1 + max((r for task in tasks for r in task.resources), default=0))
    known = [(n, tasks[n].time_s, tasks[n].resources, tasks[n].after) for n in order]
    out: list[list[float]] = []
    for _ in range(steps):
        began, ended = [0.0] * len(tasks), [0.0] * len(tasks)
        for number, time_s, resources, after in known:  # the innermost loop of the planner
            start = 0.0
            for before in after:
                if ended[before] > start:
                    start = ended[before]
            for resource in resources:
                if free[resource] > start:
                    start = free[resource]
            began[number] = start
            ended[number] = end = start + time_s
            for resource in resources:
                free[resource] = end
        out.append(began)
    return out


def makespan_s(tasks: Sequence[Task], began: Sequence[float]) -> float:
    """When the last task of a step ends."""
    return max((s + t.time_s for s, t in zip(began, tasks)), default=0.0)


def period_s(tasks: Sequence[Task], order: Sequence[int]) -> float:
    """Seconds per step of a long run: the mean of some steps after the first ones, and no less than what
    the busiest resource has to do in one."""
    runs = starts(tasks, order, WARM_UP + MEASURED)
    ends = [makespan_s(tasks, began) for began in runs]
    measured = (ends[-1] - ends[WARM_UP - 1]) / MEASURED
    return max(measured, busiest_s(tasks))


def busiest_s(tasks: Sequence[Task]) -> float:
    """What the busiest resource has to do in a step."""
    busy: dict[int, float] = {}
    for task in tasks:
        for resource in task.resources:
            busy[resource] = busy.get(resource, 0.0) + task.time_s
    return max(busy.values(), default=0.0)
