"""The order in which tasks are given to their devices: list scheduling, and what moves make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hflow.schedule.moves import LONG, WORTH, improved
from hflow.schedule.task_times import WARM_UP, Order, Task, busiest_s, period_s, starts

FIRST = float("inf")
ROUNDS = 3  # in which devices become free as they do after a step of the last one's order


class DispatchRule(NamedTuple):
    """Which of the tasks that wait for nothing comes next. `ranks`: of each task, the least first. `close_s`:
    starts that differ by less count as equal. `patient`: a lower rank counts more than a start."""

    ranks: Sequence[float]
    close_s: float
    patient: bool = False


class ListScheduler:
    """List scheduling of some tasks: among those whose predecessors are placed, always one that can start
    first; of these the one that the `DispatchRule` puts first. A setup is followed by what it sets up, unless
    that has to wait for others.

    `later`: for each task the least time of what follows from it. `short_s`: starts that differ by less count
    as equal, and tasks that take no longer as short.
    """

    def __init__(self, tasks: Sequence[Task]):
        self.tasks, self.later = tasks, _work_after(tasks)
        self.short_s = LONG * max((task.time_s for task in tasks), default=0.0)
        self._unlocks: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for before in task.after:
                self._unlocks[before].append(number)

    def order(self, rule: DispatchRule, free: Mapping[int, float] | None = None) -> Order:
        """Args:
        free: when resources become free, if not at once.
        """
        tasks, (ranks, close_s, patient) = self.tasks, rule
        waiting = [len(task.after) for task in tasks]
        known = [0.0] * len(tasks)  # the latest end of the predecessors
        freed = dict(free or {})
        order: list[int] = []
        begin = {n: _start(tasks[n], 0.0, freed) for n, count in enumerate(waiting) if not count}
        while begin:
            if order and tasks[order[-1]].sets_up_next and order[-1] + 1 in begin:
                number = order[-1] + 1
            elif len(begin) == 1:
                number = next(iter(begin))
            elif patient:
                number = min((ranks[n], start, n) for n, start in begin.items())[2]
            else:
                soon = min(begin.values()) + close_s
                number = min((ranks[n], n) for n, start in begin.items() if start <= soon)[1]
            end = begin.pop(number) + tasks[number].time_s
            order.append(number)
            occupied = dict.fromkeys(tasks[number].resources, end)
            freed.update(occupied)
            for other, start in begin.items():
                if start < end and any(resource in occupied for resource in tasks[other].resources):
                    begin[other] = end
            for next_ in self._unlocks[number]:
                known[next_] = max(known[next_], end)
                waiting[next_] -= 1
                if not waiting[next_]:
                    begin[next_] = _start(tasks[next_], known[next_], freed)
        assert len(order) == len(tasks), "tasks wait for each other"
        return tuple(order)

    def rules(self) -> Iterator[DispatchRule]:
        """Tasks that are shorter than `short_s` go first, so that a transfer does not wait for a long task
        which could start a moment before it; then those that the most work waits for; then the first in the
        list. Also patient ones, where a device rather idles than does what less work waits for. A setup
        counts as long, like what it sets up; where there are any, each also with those that are short among
        the short tasks."""
        for short_setups in (False, True) if any(task.sets_up_next for task in self.tasks) else (False,):
            lasts = (t.time_s > self.short_s or (t.sets_up_next and not short_setups) for t in self.tasks)
            ranks = [-later if is_long else -FIRST for is_long, later in zip(lasts, self.later)]
            yield DispatchRule(ranks, self.short_s)
            alike = [round(rank / self.short_s) if rank > -FIRST else rank for rank in ranks]
            yield DispatchRule(alike, self.short_s, patient=True)


def arrange(tasks: Sequence[Task]) -> Order:
    """The order in which tasks are given to their devices, the fastest in a long run of those by some rules,
    and what moves of single tasks make of it."""
    scheduler = ListScheduler(tasks)
    orders = dict.fromkeys(map(scheduler.order, scheduler.rules()))
    best = min(orders, key=lambda order: period_s(tasks, order))
    return improved(tasks, _in_a_long_run(scheduler, best))


def _in_a_long_run(scheduler: ListScheduler, order: Order) -> Order:
    """The best of an order and those of list scheduling in a step that comes after others: its devices become
    free when they have ended the step before. One that is still busy then lets the others do what does not
    need it."""
    tasks = scheduler.tasks
    seconds, enough_s = period_s(tasks, order), busiest_s(tasks) * (1 + WORTH)
    for _ in range(ROUNDS):
        if seconds <= enough_s:
            break
        free = free_after(tasks, order)
        found = dict.fromkeys(scheduler.order(rule, free) for rule in scheduler.rules())
        next_s, better = min((period_s(tasks, each), each) for each in found)
        if next_s > seconds * (1 - WORTH):
            break
        seconds, order = next_s, better
    return order


def free_after(tasks: Sequence[Task], order: Order) -> dict[int, float]:
    """When each resource has done all of a step in a long run, from the first that has."""
    *_, began = starts(tasks, order, WARM_UP)
    ends: dict[int, float] = {}
    for task, start in zip(tasks, began):
        for resource in task.resources:
            ends[resource] = max(ends.get(resource, 0.0), start + task.time_s)
    first = min(ends.values(), default=0.0)
    return {resource: end - first for resource, end in ends.items()}


def _work_after(tasks: Sequence[Task]) -> list[float]:
    """For each task the least time of what follows from it: that of the resource with most of that work."""
    descendants = [0] * len(tasks)  # bits
    for number in range(len(tasks) - 1, -1, -1):
        for before in tasks[number].after:
            descendants[before] |= descendants[number] | 1 << number
    lasting = [(1 << n, task) for n, task in enumerate(tasks) if task.time_s]
    known: dict[int, float] = {}
    for mask in descendants:
        if mask not in known:
            known[mask] = busiest_s([task for bit, task in lasting if mask & bit])
    return [known[mask] for mask in descendants]


def _start(task: Task, known: float, free: dict[int, float]) -> float:
    """`known`: when all that it waits for has ended."""
    for resource in task.resources:
        at = free.get(resource, 0.0)
        if at > known:
            known = at
    return known
