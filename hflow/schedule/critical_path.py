"""What makes a step as long as it is, and how long devices wait in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hflow.plan.program import Instruction, Program
from hflow.schedule.tasks import device_classes
from hflow.schedule.timed_span import STEADY, TimedSpan, spans, step_time_s


def critical_path(program: Program) -> tuple[TimedSpan, ...]:
    """The chain of spans, each waiting for the one before, that takes as long as a step of a long run.

    The walk goes back from the last end of all. It ends where it meets an instruction again, in an earlier
    step: from there on everything repeats, so the chain is a cycle. It is listed from the instruction that
    comes first in the program, with times counted from its start.
    """
    every = sorted(spans(program, STEADY), key=lambda s: (s.end_s, s.step, s.path), reverse=True)
    cycle = _cycle(program, every)
    first = min(range(len(cycle)), key=lambda n: cycle[n].path, default=0)
    chain: list[TimedSpan] = []
    for span in (*cycle[first:], *cycle[:first]):
        start = chain[-1].end_s if chain else 0.0
        chain.append(TimedSpan(0, span.path, span.instruction, start, start + span.time_s))
    return tuple(chain)


def _cycle(program: Program, every: Sequence[TimedSpan]) -> list[TimedSpan]:
    """In the order of time. `every`: the last to end comes first."""
    walked = list(every[:1])
    seen = {span.path: 0 for span in walked}
    while before := _cause(program, every, walked[-1]) if walked else None:
        if before.path in seen:
            walked = walked[seen[before.path] :]
            break
        seen[before.path] = len(walked)
        walked.append(before)
    return walked[::-1]


def idle(program: Program) -> dict[tuple[int, ...], float]:
    """The part of a long run's time in which devices neither compute nor move anything.

    By classes of devices that do the same.
    """
    period = step_time_s(program)
    busy: dict[tuple[int, ...], float] = defaultdict(float)
    for span in spans(program):
        busy[span.instruction.devices] += span.time_s
    groups = list(busy)
    return {
        devices: max(0.0, 1 - sum(busy[groups[n]] for n in member_of) / period) if period else 0.0
        for devices, member_of in device_classes(groups).items()
    }


def _cause(program: Program, every: Sequence[TimedSpan], span: TimedSpan) -> TimedSpan | None:
    """The last to end of all that `span` had to wait for. `every`: the last to end comes first."""
    return next((other for other in every if _waited(program, span, other)), None)


def _waited(program: Program, span: TimedSpan, other: TimedSpan) -> bool:
    """Inside a loop, a span waits for what its own devices did there; outside, for all devices of a loop."""
    if (other.step, other.path) >= (span.step, span.path):
        return False
    same_step, position = other.step == span.step, other.path[0]
    if same_step and position == span.path[0]:
        same_round = other.path[:2] == span.path[:2]
        return _waits(span.instruction, other.instruction, other.path[-1], same_round)
    outer = program.instructions[span.path[0]], program.instructions[position]
    return _waits(*outer, position, same_step)


def _waits(later: Instruction, earlier: Instruction, position: int, together: bool) -> bool:
    """`together`: both belong to the same step, or round, so that `after` speaks of them."""
    return (together and position in later.after) or not set(later.devices).isdisjoint(earlier.devices)
