"""The process of a worker, on whichever node it is: its state, and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hflow.runtime.worker.stacks import DUMP

DUMP_S = 1.0  # for a process to write its stacks
END_S = 5.0  # for the kernel to bury a process that was killed
STOPPED, GONE = psutil.STATUS_STOPPED, "gone"  # by SIGSTOP, say

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerProcess:
    """`started`: in seconds since the epoch; tells it from a later process of the same number. `dumps`: the
    descriptor of the file to which it writes its stacks (`dump_on_signal`). `node`: Ray's name of the node.
    `is_here`: that is this very machine, and Ray is our own."""

    pid: int
    started: float
    dumps: int
    node: str
    is_here: bool

    def state(self) -> Future[str]:
        """As psutil calls it, such as `STOPPED`; ``gone`` when it is."""
        return self._ask(_state)

    def dump(self) -> Future[str]:
        """The stacks that it writes when it is told to by a signal; empty if it does not."""
        return self._ask(_dump)

    def end(self) -> Future[bool]:
        """Kill it, if it is there; whether it is gone. A process that is stopped hears nothing else."""
        return self._ask(_end)

    def _ask(self, function: Callable[[WorkerProcess], T]) -> Future[T]:
        if self.is_here:
            answer: Future[T] = Future()
            answer.set_result(function(self))
            return answer
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
        return task.options(scheduling_strategy=there).remote(self).future()

    def found(self) -> psutil.Process | None:
        """On its own node; None if it is gone."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) < 1 and process.pid != os.getpid():
                return process
        return None


def _state(which: WorkerProcess) -> str:
    process = which.found()
    with suppress(psutil.Error):
        return process.status() if process else GONE
    return GONE


def _dump(which: WorkerProcess) -> str:
    process, file = which.found(), Path(f"/proc/{which.pid}/fd/{which.dumps}")
    if process is None or which.dumps < 0:
        return ""
    with suppress(psutil.Error, OSError):
        before = file.stat().st_size
        process.send_signal(DUMP)
        time.sleep(DUMP_S)
        return file.read_bytes()[before:].decode(errors="replace")
    return ""


def _end(which: WorkerProcess) -> bool:
    process = which.found()
    if process is None:
        return True
    with suppress(psutil.Error):
        process.kill()
        process.wait(END_S)
        return True
    return False
