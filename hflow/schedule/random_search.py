"""What chance finds beyond `list_scheduling.arrange`, in more time.

List scheduling by ranks that are drawn (a greedy randomized search: Feo and Resende 1995), then tasks moved
to places that are drawn, as long as no step gets longer. The same numbers are drawn each time, so that equal
tasks are put in equal orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hflow.schedule.list_scheduling import FIRST, DispatchRule, ListScheduler, arrange, free_after
from hflow.schedule.moves import LONG, WORTH
from hflow.schedule.task_times import Order, Task, busiest_s, period_s

DRAWS = 50  # orders of list scheduling,
MOVES = 100  # and then moves
SAME = 1e-9  # of a step, by which sums in another order may differ
NOISE = 0.7  # by what part of itself the rank of a task is raised or lowered at most


def best_order(tasks: Sequence[Task]) -> Order:
    """That of `arrange`, or what is found beyond it."""
    return searched(tasks, arrange(tasks))


def searched(tasks: Sequence[Task], order: Order) -> Order:
    """An order in which a step is shorter, or the same one: it stays where some resource is always busy, or
    where nothing better is found."""
    before_s, enough_s = period_s(tasks, order), busiest_s(tasks) * (1 + WORTH)
    if before_s <= enough_s:
        return order
    found = _moved(tasks, _drawn(tasks, order, enough_s, Random(0)), enough_s, Random(0))
    return found if period_s(tasks, found) < before_s * (1 - WORTH) else order


def _drawn(tasks: Sequence[Task], order: Order, enough_s: float, random: Random) -> Order:
    """The best of an order and those of list scheduling by rules that are drawn."""
    scheduler, seconds = ListScheduler(tasks), period_s(tasks, order)
    free = free_after(tasks, order)
    for _ in range(DRAWS):
        if seconds <= enough_s:
            break
        rule, late = _rule(scheduler, random), random.random() < 0.5
        found = scheduler.order(rule, free if late else None)
        found_s = period_s(tasks, found)
        if found_s < seconds * (1 - SAME):
            seconds, order, free = found_s, found, free_after(tasks, found)
    return order


def _rule(scheduler: ListScheduler, random: Random) -> DispatchRule:
    """Most short tasks go first; the others by the work that waits for them, more or less, and some of those
    on several resources before all that have one."""
    longest_s = scheduler.short_s / LONG
    ranks: list[float] = []
    for task, later in zip(scheduler.tasks, scheduler.later):
        first, noise, wide = random.random() < 0.9, random.random(), random.random() < 1 / 3
        if first and task.time_s <= scheduler.short_s and not task.sets_up_next:
            ranks.append(-FIRST)
        else:
            more_s = longest_s * len(task.resources) if wide else 0.0
            ranks.append(-later * (1 + NOISE * (2 * noise - 1)) - more_s)
    close_s = scheduler.short_s * (1, 1, 3, 10)[int(4 * random.random())]
    return DispatchRule(ranks, close_s, patient=random.random() < 0.4)


def _moved(tasks: Sequence[Task], order: Order, enough_s: float, random: Random) -> Order:
    """The best of the orders to which moves lead that make no step longer."""
    moves = Moves(tasks, order)
    now, now_s = order, period_s(tasks, order)
    best, best_s = order, now_s
    for _ in range(MOVES):
        if best_s <= enough_s:
            break
        moved = moves.drawn(now, random)
        moved_s = period_s(tasks, moved)
        if moved_s <= now_s * (1 + SAME):
            now, now_s = moved, moved_s
        if moved_s < best_s * (1 - SAME):
            best, best_s = moved, moved_s
    return best


class Moves:
    """Of single tasks to other places in an order. A setup moves with what it sets up, if that directly
    follows it in `order`, and nothing moves between the two."""

    def __init__(self, tasks: Sequence[Task], order: Order):
        place = {n: at for at, n in enumerate(order)}
        self.tasks, self.units = tasks, list[Order]((n,) for n in range(len(tasks)))
        for n, task in enumerate(tasks):
            if task.sets_up_next and place.get(n + 1) == place[n] + 1:
                self.units[n] = self.units[n + 1] = n, n + 1
        self.waiting: list[list[int]] = [[] for _ in tasks]  # of each task, for which others
        for n, task in enumerate(tasks):
            for before in task.after:
                self.waiting[before].append(n)

    def drawn(self, order: Order, random: Random) -> Order:
        """With one of the tasks at another place, after all that it waits for and before all that wait for
        it; the same order where the place that is drawn is between a setup and what it sets up."""
        unit = self.units[order[int(len(order) * random.random())]]
        rest = tuple(n for n in order if n not in unit)
        place = {n: at for at, n in enumerate(rest)}
        before = (place[b] for n in unit for b in self.tasks[n].after if b in place)
        after = (place[a] for n in unit for a in self.waiting[n] if a in place)
        least, most = max(before, default=-1) + 1, min(after, default=len(rest))
        at = least + int((most + 1 - least) * random.random())
        splits = 0 < at < len(rest) and self.units[rest[at - 1]] == self.units[rest[at]]
        return order if splits else (*rest[:at], *unit, *rest[at:])
