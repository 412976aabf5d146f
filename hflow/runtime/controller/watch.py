"""Find out which workers of a run hang: they are asked what they do every few seconds, and judged here.

A worker that waits for another, which has yet to come to where it is, is never the cause. What is left are
those that work by themselves, and those that exchange something and are all there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hflow.graph.run_config import HangPolicy
from hflow.plan.plan import Plan
from hflow.plan.program import Await, Call, Instruction, Program, SyncWeights, Transfer
from hflow.runtime.controller.deadlines import NOTICE, Durations, Usual
from hflow.runtime.controller.hang_report import HangReport, SeenWorker, Stall
from hflow.runtime.controller.worker_failure import WorkerFailure, WorkerReport
from hflow.runtime.worker.whereabouts import Whereabouts

LONGEST_PAUSE_S, SHORTEST_PAUSE_S = 5.0, 0.1  # between two questions
QUESTIONS = 15  # to a worker at least, before it counts as hung
NOWHERE = (-1, ())  # a worker that has not told yet: before all others
WAITING = "waiting for a call"
OVER = (2**63,)  # after all paths of a call
DONE = (2**63, OVER)  # with all that it was called for

_Position = tuple[int, tuple[int, ...]]  # call and path: in the order in which workers pass them


@dataclass
class _Worker:
    """`told`: its last answer, `silent_s` ago. `held_s`: for how long it has been there while nobody whom it
    waits for was behind. `noticed`: what was told of it to the user, as `silent` and `stopped`."""

    told: Whereabouts | None = None
    silent_s: float = 0.0
    held_s: float = 0.0
    noticed: set[tuple[bool, bool]] = field(default_factory=set[tuple[bool, bool]])

    @property
    def position(self) -> _Position:
        if self.told is None:
            return NOWHERE
        return self.told.call, self.told.path if self.told.method else OVER

    @property
    def seconds(self) -> float:
        """That it is where it was when it last answered."""
        return self.silent_s + (self.told.seconds if self.told else 0.0)

    def hear(self, answer: Whereabouts | None, passed_s: float) -> None:
        before, self.silent_s = self.position, self.silent_s + passed_s
        if answer is None:
            return
        self.told, self.silent_s = answer, 0.0
        if self.position != before:
            self.held_s = 0.0
            self.noticed.clear()


class Watch:
    """Of one attempt at a run: what was measured in another is not known.

    Time counts by a clock that stands still while the machine is suspended, and a pause longer than that
    between two looks counts as a short one: then this very process was stopped, or in a debugger.
    """

    def __init__(
        self,
        plan: Plan,
        policy: HangPolicy,
        report: HangReport,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            report: is told once of workers that take long.
            clock: seconds.
        """
        self.plan, self.policy = plan, policy
        self.pause_s = min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, policy.least_s / QUESTIONS))
        self._report, self._clock = report, clock
        self._names: Sequence[str] = ()
        self._durations = Durations(plan)
        self._workers: list[_Worker] = []
        self._looked, self._passed_s = clock(), 0.0

    def learn(self, call: Sequence[Any], reports: Sequence[WorkerReport]) -> None:
        """The reports of a worker call."""
        match call:
            case "run", _, bool(evaluation), *_:
                self._durations.learn(evaluation, reports)
            case _:
                pass

    def enter(self, names: Sequence[str]) -> None:
        """These workers are called from now on, and have answered nothing yet."""
        self._names, self._workers = names, [_Worker() for _ in names]
        self._looked = self._clock()

    @property
    def is_due(self) -> bool:
        """Whether it is time to look."""
        return self._clock() - self._looked >= self.pause_s

    def hear(self, answers: Sequence[Whereabouts | None]) -> None:
        """What each worker has answered since this was called last; to be followed by `hanging`."""
        now = self._clock()
        self._passed_s = min(now - self._looked, 2 * self.pause_s)
        self._looked = now
        for worker, answer in zip(self._workers, answers, strict=True):
            worker.hear(answer, self._passed_s)

    def hanging(self, called: Sequence[bool], stopped: Sequence[bool]) -> Stall | None:
        """What hangs, if anything. What takes long is told of.

        Args:
            called: whether there is a call that the worker has not answered.
            stopped: whether its process is known to be stopped by a signal.
        """
        places = [worker.position if is_called else DONE for worker, is_called in zip(self._workers, called)]
        behind = [self._behind(rank, places) for rank in range(len(places))]
        free = [rank for rank, others in enumerate(behind) if called[rank] and not others]
        for worker in (self._workers[rank] for rank in free):
            worker.held_s = min(worker.held_s + self._passed_s, worker.seconds)
        silent = [rank for rank in self.silent() if called[rank]]
        held = [rank for rank in free if rank not in silent]
        for stall in (*self._silent(silent, stopped), *self._held(held, places, behind)):
            if stall.seconds >= stall.limit_s:
                return stall
            self._tell(stall)
        return None

    def silent(self) -> tuple[int, ...]:
        """Ranks that have not answered for some time."""
        return tuple(rank for rank, w in enumerate(self._workers) if w.silent_s >= self._patience_s)

    def failure(self, stall: Stall, stacks: Mapping[int, str], states: Mapping[int, str]) -> WorkerFailure:
        """`stacks`: of the workers that have answered; `states`: of the processes of others, as far as they
        are known. Both by rank."""
        seen = [
            SeenWorker(
                name, self._doing(rank)[0], worker.seconds, stacks.get(rank), states.get(rank, "unknown")
            )
            for rank, (name, worker) in enumerate(zip(self._names, self._workers))
        ]
        return self._report.failure(stall, seen)

    @property
    def _patience_s(self) -> float:
        return self.policy.least_s / NOTICE

    def _tell(self, stall: Stall) -> None:
        notice = stall.silent, stall.stopped
        known = [self._workers[rank].noticed for rank in stall.ranks]
        if all(notice in noticed for noticed in known):
            return
        for noticed in known:
            noticed.add(notice)
        self._report.notice(stall, self._names)

    def _silent(self, ranks: Sequence[int], stopped: Sequence[bool]) -> Iterator[Stall]:
        """Workers that do not answer. One whose process is not stopped may be in a function that lets no
        other thread run, and nobody knows in which: it has as long as anything in the plan."""
        for rank in ranks:
            what, node, _ = self._doing(rank)
            usual = Usual(0.0, 0.0) if stopped[rank] else self._durations.longest()
            seconds, limit_s = self._workers[rank].silent_s, usual.deadline_s(self.policy)
            yield Stall((rank,), what, node, seconds, limit_s, usual, silent=True, stopped=stopped[rank])

    def _held(
        self, held: Sequence[int], places: Sequence[_Position], behind: Sequence[Sequence[int]]
    ) -> Iterator[Stall]:
        """Workers that wait for nobody, those in one place together, and take long."""
        together: dict[_Position, list[int]] = {}
        for rank in held:
            together.setdefault(places[rank], []).append(rank)
        for position, ranks in together.items():
            what, node, usual = self._doing(ranks[0])
            seconds = max(self._workers[rank].held_s for rank in ranks)
            if seconds < usual.notice_s(self.policy):
                continue
            passed = tuple(rank for rank in self._members(ranks[0]) if places[rank] > position)
            waiting = tuple(rank for rank, others in enumerate(behind) if set(others) & set(ranks))
            limit_s = usual.deadline_s(self.policy)
            yield Stall(tuple(ranks), what, node, seconds, limit_s, usual, passed=passed, waiting=waiting)

    def _behind(self, rank: int, places: Sequence[_Position]) -> tuple[int, ...]:
        """The workers that take part in what this one does, and have yet to come there."""
        if places[rank] == DONE:
            return ()
        return tuple(other for other in self._members(rank) if places[other] < places[rank])

    def _members(self, rank: int) -> Sequence[int]:
        """The workers that take part in what this one does: in a call that is no program, all."""
        found = self._instruction(rank)
        if found is None:
            return range(len(self._workers))
        return found[1].devices if _is_shared(self.plan, found[1]) else (rank,)

    def _instruction(self, rank: int) -> tuple[Program, Instruction] | None:
        told = self._workers[rank].told
        if told is None or not told.path:
            return None
        program = self.plan.evaluating(told.name) if told.evaluation else self.plan.step
        return program, program.at(told.path)

    def _doing(self, rank: int) -> tuple[str, str, Usual]:
        """What a worker does, for people; the node; and what that usually takes."""
        told, found = self._workers[rank].told, self._instruction(rank)
        if told is None:
            return WAITING, "", Usual(0.0, 0.0)
        usual = self._durations.usual(found[0] if found else None, told)
        if found:
            return f"in `{found[0].kind_and_name(found[1])[1]}`", found[1].node, usual
        detail = f" ({told.detail})" if told.detail else ""
        return (f"in `{told.method}`{detail}" if told.method else WAITING), "", usual


def _is_shared(plan: Plan, instruction: Instruction) -> bool:
    """Whether its devices wait for one another: models do that, functions do not."""
    match instruction:
        case Transfer() | SyncWeights():
            return True
        case Call() | Await():
            return any(n.node == instruction.node and n.model for n in plan.all_nodes)
        case _:
            return False
