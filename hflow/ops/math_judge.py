"""Mathematical equality, judged by math-verify in a process of its own.

Responses are written by models: parsing and simplifying one may take for ever, exhaust memory or crash the
interpreter. A child process (`hflow.ops.math_child`) does it, one per process of hflow; it lives as long as
it behaves. What ends it costs the item in hand, not the run:

- the kernel's alarm, which the child sets before each item. Nothing in the child can hold it off, not even a
  C function that never returns to Python;
- the limit on its memory;
- the death of its parent: when the child is idle it sees that within a second, at work by its alarm.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

READY, EQUAL, DIFFERENT, NO_ANSWER = b"R", b"1", b"0", b"?"
_CHILD = Path(__file__).with_name("math_child.py")


class MathJudge:
    """Owns the child process, and starts another when it is gone."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def equal(self, response: str, answer: str, timeout_s: float) -> bool:
        """Whether `response` gives `answer`; False when it cannot be told in time.

        Raises:
            ImportError: math-verify is not installed.
            ValueError: `answer` holds no expression, or `timeout_s` is not positive.
            RuntimeError: the child does not start.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s:g}; it is positive")
        with self._lock:
            verdict = _ask(self._running(), [response, answer, timeout_s])
        if verdict == NO_ANSWER:
            raise ValueError(f"answer {answer!r} holds no mathematical expression")
        return verdict == EQUAL

    @property
    def pid(self) -> int | None:
        """Of the child, while it runs."""
        alive = self._child is not None and self._child.poll() is None
        return self._child.pid if self._child is not None and alive else None

    def close(self) -> None:
        """End the child and wait for it."""
        if self._child is None:
            return
        self._child.kill()
        self._child.communicate()
        self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("math-verify is not installed: pip install -e '.[math]' in hflow's checkout")
        # -P: this folder, which holds the script, must not be searched for modules.
        command = [sys.executable, "-P", str(_CHILD), str(os.getpid())]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        if _reply(self._child) != READY:
            self.close()
            raise RuntimeError("the process that runs math-verify does not start; stderr may say why")
        return self._child


@cache
def math_judge() -> MathJudge:
    """The judge of this process."""
    judge = MathJudge()
    atexit.register(judge.close)
    return judge


def _ask(child: subprocess.Popen[bytes], question: list[str | float]) -> bytes:
    """The child's reply, empty when it ends before it has one."""
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(question).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        return b""
    return _reply(child)


def _reply(child: subprocess.Popen[bytes]) -> bytes:
    """The next byte, or none when the child has ended; its exit is then waited for."""
    assert child.stdout is not None
    reply = child.stdout.read(1)
    if not reply:
        child.wait()
    return reply
