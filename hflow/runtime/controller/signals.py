"""Signals that ask a run to end become an exception, so that it cleans up like after Ctrl-C."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType

from hflow.diagnostics import Terminated

ENDING = (signal.SIGTERM, signal.SIGHUP)  # asked to end; the terminal is gone


class EndingSignals(AbstractContextManager["EndingSignals"]):
    """While entered, an ending signal raises `Terminated` in the main thread.

    Outside the main thread the embedding program owns its signals, and nothing is changed. A signal that
    was ignored before (as under nohup) stays ignored.
    """

    def __enter__(self) -> EndingSignals:
        in_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in ENDING} if in_main else {}
        self._before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
        self.install()
        return self

    def install(self) -> None:
        """Take the signals, again if somebody else has put handlers in place meanwhile."""
        for number in self._before:
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
