"""A program and all processes that it starts: they live together and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import psutil

WATCH_S = 0.5  # between two looks at the processes
GRACE_S = 4.0  # for a tree that has lost a process to say so, and end by itself
END_S = 120.0  # for killed processes to end


class Tree:
    """Runs `command` with `given` on its standard input and its output in the file `log`.

    The processes make a session of their own, which is how they are found: whoever of them ends, the others
    stay in it. The first one is not reaped before `end`, so that no other process can get its number.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str], given: str, environment: Mapping[str, str], log: Path) -> None:
        self._needed: list[psutil.Process] = []
        self._ending = threading.Event()
        started: Future[subprocess.Popen[str]] = Future()
        self._keeper = threading.Thread(
            target=self._keep, args=(started, command, given, environment, log), daemon=True
        )
        self._keeper.start()
        self._first = started.result()

    def _keep(
        self,
        started: Future[subprocess.Popen[str]],
        command: Sequence[str],
        given: str,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start the program and stay until its end: to the kernel, a process's parent is the thread that
        started it, and a worker's threads come and go. What is left of a broken tree is killed."""
        try:
            started.set_result(_start(command, given, environment, log))
        except BaseException as error:
            started.set_exception(error)
            return
        while not self._ending.wait(WATCH_S):
            if not self.whole and not self._ending.wait(GRACE_S):
                _kill(self.members())

    @property
    def pid(self) -> int:
        return self._first.pid

    @property
    def whole(self) -> bool:
        """Whether the program and all processes that it needs live."""
        return _lives(self._first.pid) and all(_lives(process) for process in self._needed)

    def members(self) -> list[psutil.Process]:
        """The processes that live."""
        return [p for p in psutil.process_iter() if _session(p.pid) == self._first.pid and _lives(p)]

    def need_children(self) -> None:
        """From now on, the tree is whole only with the processes that the program itself has started. What
        these start for a while, as compilers do, may end."""
        self._needed = psutil.Process(self._first.pid).children()

    def end(self) -> None:
        """Kill all processes and wait until they have ended. Once."""
        self._ending.set()
        deadline = time.monotonic() + END_S
        while (members := self.members()) and time.monotonic() < deadline:
            _kill(members)
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(self._first.pid, signal.SIGKILL)
        self._first.wait(END_S)
        self._keeper.join()


def _kill(processes: Sequence[psutil.Process]) -> None:
    """But multiprocessing's resource tracker, which removes what the others have left, and then ends."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                process.kill()


def _start(
    command: Sequence[str], given: str, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[str]:
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # it has ended: `whole` tells
        process.stdin.write(given)
    return process


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid)
    return None


def _lives(process: psutil.Process | int) -> bool:
    """A zombie does not."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
