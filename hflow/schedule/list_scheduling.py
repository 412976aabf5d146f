"""The order in which tasks are given to their devices: list scheduling, and what moves make of it."""

from __future__ import annotations

from collections.abc import Sequence

from hflow.schedule.moves import improved
from hflow.schedule.task_times import Task, busiest_s, period_s

FIRST = float("inf")


def arrange(tasks: Sequence[Task]) -> tuple[int, ...]:
    """The order in which tasks are given to their devices, the fastest in a long run of: list scheduling; and
    patient, where a device rather idles than does what less work waits for. Each also with setups among the
    short tasks, if there are such. Then what moves of single tasks make of it."""
    later = _work_after(tasks)
    orders: dict[tuple[int, ...], None] = {}
    for short_setups in (False, True) if any(task.sets_up_next for task in tasks) else (False,):
        orders |= {_list_schedule(tasks, later, short_setups, patient): None for patient in (False, True)}
    return improved(tasks, min(orders, key=lambda order: period_s(tasks, order)))


def _list_schedule(
    tasks: Sequence[Task], later: Sequence[float], short_setups: bool, patient: bool
) -> tuple[int, ...]:
    """List scheduling: among tasks whose predecessors are placed, always one that can start first. Starts
    that differ by less than a hundredth of the longest task count as equal. Then tasks shorter than that go
    first, so that a transfer does not wait for a long task which could start a moment before it; then those
    that the most work waits for; then the first in the list. A setup counts as long, like what it sets up.

    Args:
        later: the least time of what follows from each task.
        short_setups: a setup counts as long as it takes.
        patient: that much work waits for a task counts more than that it can start first.
    """
    close = max((t.time_s for t in tasks), default=0.0) / 100
    long = [task.time_s > close or (task.sets_up_next and not short_setups) for task in tasks]
    rank = [-seconds if is_long else -FIRST for is_long, seconds in zip(long, later)]
    urgent = [round(r / close) if r > -FIRST else r for r in rank]
    waiting = [len(t.after) for t in tasks]
    unlocks: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            unlocks[before].append(number)
    known = [0.0] * len(tasks)  # the latest end of the predecessors
    free: dict[int, float] = {}
    order: list[int] = []
    begin = {n: 0.0 for n, count in enumerate(waiting) if not count}
    while begin:
        if order and tasks[order[-1]].sets_up_next and order[-1] + 1 in begin:
            number = order[-1] + 1
        elif len(begin) == 1:
            number = next(iter(begin))
        elif patient:
            number = min((urgent[n], start, n) for n, start in begin.items())[2]
        else:
            soon = min(begin.values()) + close
            number = min((rank[n], n) for n, start in begin.items() if start <= soon)[1]
        end = begin.pop(number) + tasks[number].time_s
        order.append(number)
        occupied = dict.fromkeys(tasks[number].resources, end)
        free.update(occupied)
        for other, start in begin.items():
            if start < end and any(resource in occupied for resource in tasks[other].resources):
                begin[other] = end
        for next_ in unlocks[number]:
            known[next_] = max(known[next_], end)
            waiting[next_] -= 1
            if not waiting[next_]:
                begin[next_] = _start(tasks[next_], known[next_], free)
    assert len(order) == len(tasks), "tasks wait for each other"
    return tuple(order)


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
