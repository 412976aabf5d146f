"""Questions to workers while they work. Only `answers` and `stopped` wait for nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from hflow.runtime.controller.worker_process import STOPPED, WorkerProcess
from hflow.runtime.worker.whereabouts import Whereabouts

WAIT_S = 5.0


class Questions:
    """To the actors of a world, and to the nodes of their processes; both by rank."""

    def __init__(self, actors: Sequence[Any], processes: Sequence[WorkerProcess]):
        self._actors, self._processes = actors, processes
        self._asked: dict[int, Future[Whereabouts]] = {}
        self._states: dict[int, Future[str]] = {}
        self._stopped: set[int] = set()

    def answers(self) -> list[Whereabouts | None]:
        """What workers have answered since this was called last; those that have are asked again."""
        found = [self._answer(rank) for rank in range(len(self._actors))]
        for rank, actor in enumerate(self._actors):
            if rank not in self._asked:
                self._asked[rank] = actor.whereabouts.remote().future()
        return found

    def stopped(self, silent: Collection[int]) -> list[bool]:
        """Which processes are stopped, as far as is known: of `silent` ranks it is found out, and known by a
        later call if their node is another."""
        self._stopped &= set(silent)
        for rank in silent:
            if rank not in self._states:
                self._states[rank] = self._processes[rank].state()
            if self._states[rank].done():
                self._note(rank, self._states.pop(rank))
        return [rank in self._stopped for rank in range(len(self._actors))]

    def stacks(self) -> dict[int, str]:
        """Those of all threads, by the rank of the workers that answer."""
        return _answered({rank: actor.stacks.remote().future() for rank, actor in enumerate(self._actors)})

    def states(self, ranks: Collection[int]) -> dict[int, str]:
        """Of processes (`WorkerProcess.state`), by the rank of those whose node answers."""
        return _answered({rank: self._processes[rank].state() for rank in ranks})

    def dumps(self, ranks: Collection[int]) -> dict[int, str]:
        """The stacks of workers that answer nothing, but whose processes run; where there are any."""
        texts = _answered({rank: self._processes[rank].dump() for rank in ranks})
        return {rank: text for rank, text in texts.items() if text}

    def _answer(self, rank: int) -> Whereabouts | None:
        asked = self._asked.get(rank)
        if asked is None or not asked.done():
            return None
        del self._asked[rank]
        return None if asked.exception() else asked.result()

    def _note(self, rank: int, state: Future[str]) -> None:
        """A node that cannot be asked tells nothing."""
        if not state.exception() and state.result() == STOPPED:
            self._stopped.add(rank)
        else:
            self._stopped.discard(rank)


def _answered(asked: Mapping[int, Future[str]]) -> dict[int, str]:
    wait(asked.values(), WAIT_S)
    ended = {rank: answer for rank, answer in asked.items() if answer.done()}
    return {rank: answer.result() for rank, answer in ended.items() if not answer.exception()}
