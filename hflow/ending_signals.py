"""Signals that ask the process to end are recorded when they come, and raise only where that leaves nothing
behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

from hflow.diagnostics import Terminated

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C; asked to end; the terminal is gone
FORCING = 3  # the signal that does not wait for cleaning up
STANDARD_ERROR = 2


class EndingSignals(AbstractContextManager["EndingSignals"]):
    """While entered, ending signals are recorded in `asked`. The first raises, at once within `interruptible`
    and else when that is entered: KeyboardInterrupt for SIGINT, `Terminated` for the others.

    Later ones raise nothing, so that what the first has begun to clean up is cleaned up; only from the third
    on each raises, wherever it comes. Objects may be nested, and share what was asked. Outside the main
    thread the embedding program owns its signals, and nothing is changed. A signal that was ignored before
    (as under nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.notice = ""  # what the first signal begins, for the user
        self._open = False
        self._grace: threading.Timer | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> EndingSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        before = {number: signal.getsignal(number) for number in ENDING}
        self._before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
        for handler in self._before.values():
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, EndingSignals):
                self.asked = outer.asked
        self.install()
        return self

    def install(self) -> None:
        """Take the signals, again if somebody else has put handlers in place meanwhile."""
        for number in self._before:
            signal.signal(number, self._handle)

    def ignore(self) -> None:
        """From now on, for the rest of the process: Python's own end takes a moment, too."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before = {}

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Here the first signal raises; one that came before, or that something swallowed, at the edges."""
        self._open = True
        try:
            self.check()
            yield
            self.check()
        finally:
            self._open = False

    @contextmanager
    def graceful(self, seconds: float, notice: str) -> Iterator[None]:
        """Here, within `interruptible`, the first signal only begins a time of grace, in which the block may
        end by itself; when that is over, or a second signal comes, it raises."""
        before, self.notice = self.notice, notice
        thread = threading.main_thread().ident
        self._grace = threading.Timer(seconds, lambda: signal.pthread_kill(thread or 0, self.asked[0]))
        self._grace.daemon = True
        try:
            yield
        finally:
            self._grace.cancel()
            self._grace, self.notice = None, before

    def check(self) -> None:
        """Raise if a signal has come."""
        if self.asked:
            raise self._ending()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)
        count = len(self.asked)
        if self.notice and count < FORCING:
            _write_line(self._text(number))
        if self._grace and count == 1:
            self._grace.start()
        elif count >= FORCING or (self._open and (count == 1 or self._grace)):
            raise self._ending()

    def _text(self, number: int) -> str:
        if len(self.asked) == 1:
            return f"{signal.Signals(number).name}: {self.notice}"
        if self._grace:
            return f"{signal.Signals(number).name}: leaving without waiting any longer …"
        return "still ending; the next signal leaves at once, and what is left then ends by itself"

    def _ending(self) -> BaseException:
        first = self.asked[0]
        return KeyboardInterrupt() if first == signal.SIGINT else Terminated(first)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _write_line(text: str) -> None:
    """On standard error, past Python's buffer: the signal may have come while that was written."""
    with suppress(OSError):  # nobody reads it any more
        os.write(STANDARD_ERROR, f"{text}\n".encode())
