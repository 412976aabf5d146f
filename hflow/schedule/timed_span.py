"""When the instructions of a program run, step after step, by their predicted times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hflow.graph.ir import Graph
from hflow.plan.program import Activity, Instruction, Loop, Program
from hflow.plan.workload import rounds
from hflow.schedule.task_times import MEASURED, WARM_UP, makespan_s, period_s, starts
from hflow.schedule.tasks import tasks

STEADY = WARM_UP + MEASURED  # steps after which each is as the one before


@dataclass(frozen=True)
class TimedSpan:
    """`instruction` runs from `start_s` to `end_s`, in seconds from the start of the first step.

    `path`: its position in the program's list; inside a loop, the loop's position, the round, and its
    position in the body.
    """

    step: int
    path: tuple[int, ...]
    instruction: Activity
    start_s: float
    end_s: float

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


def spans(program: Program, steps: int = 1) -> tuple[TimedSpan, ...]:
    """The spans of the first `steps` steps, in the order of the program.

    A loop shows as what its rounds do. What only keeps or drops (free, release, recall, carry) takes no time
    and has no span.
    """
    instructions = program.instructions
    runs = starts(tasks(instructions), range(len(instructions)), steps)
    return tuple(
        span
        for step, began in enumerate(runs)
        for position, (instruction, start) in enumerate(zip(instructions, began))
        for span in _spans(program.graph, step, position, instruction, start)
    )


def steady_spans(program: Program) -> tuple[TimedSpan, ...]:
    """The spans of one step of a long run, in seconds from the first start among them."""
    last = [s for s in spans(program, STEADY) if s.step == STEADY - 1]
    zero = min((s.start_s for s in last), default=0.0)
    return tuple(TimedSpan(0, s.path, s.instruction, s.start_s - zero, s.end_s - zero) for s in last)


def step_time_s(program: Program) -> float:
    """Seconds per step of a long run."""
    return period_s(tasks(program.instructions), range(len(program.instructions)))


def loop_time_s(graph: Graph, loop: Loop) -> float:
    """Seconds that all rounds of a loop take."""
    made = tasks(loop.body)
    runs = _rounds(graph, loop)
    return max((makespan_s(made, began) for began in runs), default=0.0)


def _rounds(graph: Graph, loop: Loop) -> list[list[float]]:
    """When each instruction of a loop's body starts, round by round."""
    return starts(tasks(loop.body), range(len(loop.body)), rounds(graph, graph.node(loop.node)))


def _spans(
    graph: Graph, step: int, position: int, instruction: Instruction, start: float
) -> Iterator[TimedSpan]:
    if not isinstance(instruction, Loop):
        yield from _span(step, (position,), instruction, start)
        return
    for number, began in enumerate(_rounds(graph, instruction)):
        for inner, (inside, after_s) in enumerate(zip(instruction.body, began)):
            yield from _span(step, (position, number, inner), inside, start + after_s)


def _span(step: int, path: Sequence[int], instruction: Instruction, start: float) -> Iterator[TimedSpan]:
    if isinstance(instruction, Activity):
        yield TimedSpan(step, tuple(path), instruction, start, start + instruction.time_s)
