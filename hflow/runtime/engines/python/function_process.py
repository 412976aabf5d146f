"""The process in which a worker has `call` nodes executed whose functions are the user's.

What a function does to its process (a crash, `os._exit`, a loop without end, memory that it keeps, forks) it
does to this one, and the worker tells what has happened.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from hflow.graph.infer.kinds.call import time_limit_s
from hflow.runtime.engines.protocol import EngineCall, NodeError, Result, Stopped
from hflow.runtime.engines.python.function_channel import BadMessageError, FunctionChannel, FunctionMessage
from hflow.runtime.engines.python.remote_call import question, result_of
from hflow.runtime.engines.python.written_lines import WrittenLines
from hflow.runtime.rows import Rows

POLL_S = 0.05  # between two looks whether to go on waiting
END_S = 5.0  # for a closed connection's process to be dead, and for its last output to come
STACK_S = 2.0  # for a process to write where it is
KEPT_BYTES, LAST_LINES, LINE_CHARACTERS = 2**16, 15, 200  # of what it last wrote to stderr
_START = f"import sys; sys.path[:] = sys.argv[1].split({os.pathsep!r}); from {{module}} import main; main()"
_MODULE = f"{__package__}.function_child"
_OURS = str(Path(__file__).parent)


class _TimeUp(Exception):  # noqa: N818  (it is what happened)
    pass


class FunctionProcess:
    """One process, started at once and for as long as the worker lives. What functions keep in their modules
    stays from call to call. One thread calls `run`; `end` may come from another."""

    def __init__(self, references: Sequence[str], stopped: threading.Event) -> None:
        """Start it; it gets ready by itself.

        Args:
            references: functions to import at once. What fails there is told by the call.
            stopped: set when nobody waits for results any more.

        Raises:
            OSError: it cannot be started.
        """
        self.stopped = stopped
        self._importing = ", ".join(f"`{reference}`" for reference in references)
        self._pid: int | None = None  # when it is ready
        self._deadline: float | None = None
        ours, theirs = socket.socketpair()
        self._life, their_life = socket.socketpair()  # ends with this process, however that does
        with theirs, their_life:
            self._process = _start(theirs, their_life, references)
        ours.setblocking(False)
        self._connection = ours
        self._channel = FunctionChannel(ours, self._wait)
        assert self._process.stdout is not None and self._process.stderr is not None
        self.written = WrittenLines()
        self._prints = _Tail(self._process.stdout, 1, self.written)
        self._errors = _Tail(self._process.stderr, 2, self.written)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """Execute a `call` node there on the local rows.

        Raises:
            NodeError: as `run_call`; HF401 too when the process ends, or the node's `timeout_s` is over.
            Stopped: nobody waits for the result any more. The process has ended then.
        """
        function = call.node.function
        assert function is not None
        self._deadline = None
        try:
            if self._pid is None:
                self._pid = int(self._channel.receive().fields["ready"])
            self.written.node = call.node.name
            answered = self._ask(question(call, inputs), time_limit_s(call.node))
        except Stopped:
            self.end()
            raise
        except _TimeUp:
            limit = f"{time_limit_s(call.node):g} s (`timeout_s`)"
            self._tell_stack()
            problem = f"did not return within {limit}; its process was ended"
            raise NodeError(call.node.name, self._problem(function.reference, problem)) from None
        except (EOFError, OSError, BadMessageError) as error:
            problem = self._end_problem(isinstance(error, BadMessageError))
            raise NodeError(call.node.name, self._problem(function.reference, problem)) from None
        return result_of(answered, call.node.name)

    def stack(self) -> str:
        """Where its functions are, with what they last wrote to stderr (called from another thread)."""
        if self._pid is None or not self.alive:
            return ""
        self._tell_stack()
        return self._errors.last_lines()

    def end(self) -> None:
        """Kill it and what its functions have started. Twice is once."""
        self._life.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # its guard has been stopped
            self._process.kill()
            self._process.wait()
        self._prints.wait()
        self._errors.wait()
        self._connection.close()

    def _ask(self, asked: FunctionMessage, limit_s: float | None) -> FunctionMessage:
        """The time limit begins when the process has all that it needs."""
        self._channel.send(asked)
        self._deadline = time.monotonic() + limit_s if limit_s else None
        return self._channel.receive()

    def _wait(self, writing: bool) -> None:
        """Until the socket may be ready; a moment at most.

        Raises:
            Stopped: nobody waits any more.
            _TimeUp: the function's time is over.
            EOFError: the process has ended, although something holds its connection open.
        """
        if self.stopped.is_set():
            raise Stopped
        if self._deadline and time.monotonic() >= self._deadline:
            raise _TimeUp
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT if writing else select.POLLIN)
        if not poll.poll(1000 * POLL_S) and not self.alive and not poll.poll(0):
            raise EOFError

    def _tell_stack(self) -> None:
        """Have it write where it is, and wait for that. What is stopped (SIGSTOP) does not answer."""
        assert self._pid
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)
        self._errors.wait_for_more(STACK_S)

    def _end_problem(self, is_garbage: bool) -> str:
        """Why the connection has broken."""
        self._life.settimeout(END_S)
        try:
            status = 0 if is_garbage else int(self._life.recv(16))
        except (OSError, ValueError):  # it lives, or its guard has been killed
            is_garbage, status = True, 0
        if is_garbage:
            return "wrote to, or closed, what is hflow's in its process, which was ended"
        if status >= 0:
            return f"ended its process with exit code {status}"
        name = signal.Signals(-status).name
        why = ", as the kernel does when memory runs out" if -status == signal.SIGKILL else ""
        return f"was ended by signal {-status} ({name}){why}"

    def _problem(self, reference: str, problem: str) -> str:
        self.end()
        who = f"`{reference}`" if self._pid else f"importing {self._importing}"
        lines = self._errors.last_lines()
        return f"{who} {problem}" + (f"\nThe end of its stderr:\n{lines}" if lines else "")


class _Tail:
    """Hands a process's output on to this one's `descriptor` and, in lines, to `written`; keeps its end."""

    def __init__(self, stream: IO[bytes], descriptor: int, written: WrittenLines) -> None:
        self._stream, self._descriptor, self._written = stream, descriptor, written
        self._kept = b""
        self._count = 0
        self._thread = threading.Thread(target=self._read, name="functions' output", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all is read; what has left the process group may hold it open for longer."""
        self._thread.join(END_S)

    def wait_for_more(self, seconds: float) -> None:
        """Until more has come, and nothing for a moment; at most so long."""
        deadline, before = time.monotonic() + seconds, self._count
        while time.monotonic() < deadline:
            seen = self._count
            time.sleep(2 * POLL_S)
            if before < seen == self._count:
                return

    def last_lines(self) -> str:
        """Indented by two; without hflow's own frames, and without what faulthandler lists after a crash."""
        lines = self._kept.decode(errors="replace").splitlines()
        told = [line for line in lines if line.strip() and not _is_noise(line)]
        return "\n".join(f"  {line[:LINE_CHARACTERS]}" for line in told[-LAST_LINES:])

    def _read(self) -> None:
        begun = b""
        while chunk := os.read(self._stream.fileno(), 4096):
            self._kept = (self._kept + chunk)[-KEPT_BYTES:]
            self._count += 1
            with suppress(OSError):  # nobody reads it any more
                os.write(self._descriptor, chunk)
            *lines, begun = (begun + chunk).split(b"\n")
            for line in lines:
                self._written.add(line)
            begun = begun[:KEPT_BYTES]  # of a line that does not end
        if begun:
            self._written.add(begun)
        self._stream.close()


def _is_noise(line: str) -> bool:
    start = line.endswith('File "<string>", line 1 in <module>')
    return start or _OURS in line or line.startswith("Extension modules:")


def _start(
    connection: socket.socket, life: socket.socket, references: Sequence[str]
) -> subprocess.Popen[bytes]:
    """A new program, not a fork: this process has threads, sockets and perhaps a GPU. In a session of its
    own, so that a terminal's Ctrl-C does not reach it."""
    descriptors = connection.fileno(), life.fileno()
    program = [sys.executable, *["-O"] * sys.flags.optimize, "-c", _START.format(module=_MODULE)]
    return subprocess.Popen(
        [*program, os.pathsep.join(sys.path), *map(str, descriptors), *references],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=descriptors,
        start_new_session=True,
    )
