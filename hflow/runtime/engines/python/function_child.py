"""The program of a process of functions: it executes `call` nodes for one worker, one after another.

Started by `function_process`, with the worker's module path, environment and folder. There are two processes:
the functions', and one that waits until either this or the worker has ended, and then ends what is left.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from hflow.runtime.engines.lifetime import die_with

FIRST = "500"  # of 1000: when memory runs out, the kernel ends this process before the worker


def main() -> None:
    """Arguments: the module path (already taken), the descriptors of the sockets that `serve` and `_guard`
    have with the worker, and the functions to import at once."""
    connection, life = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[2:4])
    for each in (connection, life):
        each.set_inheritable(False)
    guard = os.getpid()
    if functions := os.fork():  # there is nothing yet that does not outlive a fork
        connection.close()
        _guard(functions, life)
    os.setpgid(0, 0)
    die_with(guard)
    life.close()
    os.register_at_fork(after_in_child=connection.close)  # a function's forks have no part in the answers
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    serve(connection, sys.argv[4:])


def _guard(functions: int, life: socket.socket) -> NoReturn:
    """Wait for the end of the functions' process or of the worker, however that comes; end the process
    and what it has started, and say how it ended. No thread of that process could: a function may keep
    Python's lock for ever. Nor could the kernel (PR_SET_PDEATHSIG): it tells of threads, and a worker's come
    and go."""
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(functions, functions)  # as it does itself; whoever comes first
    ended = select.poll()
    for descriptor in (life.fileno(), os.pidfd_open(functions)):
        ended.register(descriptor, select.POLLIN)
    ended.poll()
    with suppress(ProcessLookupError):
        os.killpg(functions, signal.SIGKILL)
    _, status = os.waitpid(functions, 0)
    with suppress(OSError):
        life.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def serve(connection: socket.socket, references: list[str]) -> None:
    """Answer until the worker closes its end."""
    # after the fork, which nothing of this would survive
    from hflow.runtime.engines.python.function_channel import FunctionChannel, FunctionMessage
    from hflow.runtime.engines.python.remote_call import answer
    from hflow.runtime.functions import load_function

    for reference in references:
        with suppress(BaseException):  # told by the call
            load_function(reference)
    channel, own = FunctionChannel(connection), os.getpid()
    channel.send(FunctionMessage({"ready": own}))
    with suppress(EOFError):
        while True:
            answered = answer(channel.receive())
            with suppress(Exception):  # whatever a function has made of it
                sys.stdout.flush()
            if os.getpid() != own:  # a fork of the function's that came back
                os._exit(0)
            channel.send(answered)
