"""The program that `hflow.ops.math_judge` runs: JSON lines in, one byte per line out.

It is started by its path, so that it imports neither hflow nor torch. A line is
``[response, answer, timeout_s]``; the byte is one of `math_judge`'s.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import select
import signal
import sys

START_LIMIT_S = 120  # importing sympy from a slow file system
PARENT_CHECK_S = 1.0
MEMORY_BYTES = 4 << 30
BOX = "\\boxed"
MARK = re.compile(r"(?<!\\)\$")  # of LaTeX, which an escaped dollar sign is not


def main(parent: int) -> None:
    """Serve until the pipe ends or the parent is gone."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    _limit()
    signal.alarm(START_LIMIT_S)
    import math_verify  # noqa: F401

    signal.alarm(0)
    logging.disable()
    os.write(replies, b"R")
    while line := _next_line(parent):
        response, answer, timeout_s = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        reply = _judge(response, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(replies, reply)


def _limit() -> None:
    """The alarm ends the process, whatever the parent's dispositions; Ctrl-C is the parent's affair."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected, its memory image unwanted


def _next_line(parent: int) -> bytes:
    """The next line, empty at the end. A process forked from the parent may keep the pipe open."""
    while os.getppid() == parent:
        if select.select([0], [], [], PARENT_CHECK_S)[0]:
            return sys.stdin.buffer.readline()
    return b""


def _judge(response: str, answer: str) -> bytes:
    """math-verify's own timeouts are off: they are Python code, and the alarm is not."""
    from math_verify import parse, verify

    try:
        expected = parse(_boxed(answer), parsing_timeout=None)  # type: ignore[arg-type]
        equal = any(
            verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None)  # type: ignore[arg-type]
            for text in _given(response)
        )
    except (Exception, RecursionError, MemoryError):
        return b"0"
    if not expected:
        return b"?"
    return b"1" if equal else b"0"


def _boxed(answer: str) -> str:
    """LaTeX is only recognised as such between marks, which answers of datasets often lack."""
    return answer if BOX in answer or MARK.search(answer) else f"{BOX}{{{answer}}}"


def _given(response: str) -> tuple[str, ...]:
    """math-verify takes all boxes of a response together, which is right for an answer in parts. One that
    corrects itself means the last."""
    last = response.rfind(BOX)
    return (response,) if response.count(BOX) < 2 else (response, response[last:])


if __name__ == "__main__":
    main(int(sys.argv[1]))
