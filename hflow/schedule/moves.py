"""A better order of tasks from a good one: long tasks are moved before others while a step gets shorter.

List scheduling looks at one step. Where steps overlap, a task that nobody waits for in its own step may be
what the next step begins with: a rollout that runs while the model is trained waits for its devices to have
scored the last one, and for weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hflow.schedule.task_times import MEASURED, WARM_UP, Order, Task, busiest_s, makespan_s, starts

ROUNDS = 4  # moves in sequence
WORTH = 1e-3  # of a step: what a move must save
LONG = 1e-2  # of the longest task: shorter ones are short, and move only with those that wait for them


class Pace(NamedTuple):
    """How long a step takes, and when its tasks start on average: less is better."""

    period_s: float
    start_s: float

    def beats(self, other: Pace) -> bool:
        least_s = other.period_s * WORTH
        if abs(self.period_s - other.period_s) > least_s:
            return self.period_s < other.period_s
        return self.start_s < other.start_s - least_s


def improved(tasks: Sequence[Task], order: Order) -> Order:
    """What single moves lead to, one after the other, always the best one. It stays as it is where some
    resource is always busy."""
    least_s, ancestors = busiest_s(tasks), _ancestors(tasks)
    tasks = [replace(task, after=_last(task.after, ancestors)) for task in tasks]
    pace = _pace(tasks, order)
    for _ in range(ROUNDS):
        if pace.period_s <= least_s * (1 + WORTH):
            break
        moved = min(((_pace(tasks, o), o) for o in _moved(tasks, order, ancestors)), default=(pace, order))
        if not moved[0].beats(pace):
            break
        pace, order = moved
    return order


def _pace(tasks: Sequence[Task], order: Order) -> Pace:
    runs = starts(tasks, order, WARM_UP + MEASURED)
    first_s, last_s = (makespan_s(tasks, runs[step]) for step in (WARM_UP - 1, -1))
    return Pace((last_s - first_s) / MEASURED, sum(runs[-1]) / max(1, len(tasks)))


def _moved(tasks: Sequence[Task], order: Order, ancestors: Sequence[int]) -> Iterator[Order]:
    """Each long task before each one on its resources that was before it and that it does not wait for."""
    close_s = max(task.time_s for task in tasks) * LONG
    long = [at for at, number in enumerate(order) if tasks[number].time_s > close_s]
    movable = (at for at in long if not tasks[order[at]].sets_up_next)
    for first, at in ((first, at) for at in movable for first in long if first < at):
        waits_for = ancestors[order[at]]
        if waits_for >> order[first] & 1 or _apart(tasks, order[first : at + 1], waits_for):
            continue
        first -= 1 if first and tasks[order[first - 1]].sets_up_next else 0
        yield _moved_to(first, at, tasks, order, ancestors, close_s)


def _moved_to(
    first: int, at: int, tasks: Sequence[Task], order: Order, ancestors: Sequence[int], close_s: float
) -> Order:
    """The order with what is at `at` at `first`. With it come the tasks that it waits for, and then short
    ones that wait for it, so that a transfer waits for no long task."""
    number = order[at]
    before = [*order[:first], *(n for n in order[first:at] if ancestors[number] >> n & 1), number]
    done = sum(1 << n for n in before)
    for n in order[at + 1 :]:
        if tasks[n].time_s <= close_s and ancestors[n] >> number & 1 and not ancestors[n] & ~done:
            before.append(n)
            done |= 1 << n
    return (*before, *(n for n in order[first:] if not done >> n & 1))


def _apart(tasks: Sequence[Task], order: Order, ancestors: int) -> bool:
    """Whether the last task of `order`, and those that it waits for, run on none of the first one's
    resources."""
    first, *_, last = order
    own = tasks[first].resources
    moving = (last, *(n for n in order if ancestors >> n & 1))
    return all(r not in own for n in moving for r in tasks[n].resources)


def _last(after: Sequence[int], ancestors: Sequence[int]) -> tuple[int, ...]:
    """Those for which none of the others waits."""
    return tuple(n for n in after if not any(ancestors[other] >> n & 1 for other in after))


def _ancestors(tasks: Sequence[Task]) -> list[int]:
    """For each task those that must have ended in the same step, as bits."""
    found: list[int] = []
    for task in tasks:
        bits = 0
        for before in task.after:
            bits |= found[before] | 1 << before
        found.append(bits)
    return found
