"""Where the threads of a worker are: told by one of them, or by a signal's handler where none can run."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback

DUMP = signal.SIGUSR2


def stacks() -> str:
    """Of all other threads of this process, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    texts = [
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames
        if number != threading.get_ident()
    ]
    return "\n".join(texts)


def dump_on_signal() -> int:
    """From now on the signal `DUMP` has this process append its stacks to a file in memory, even while a
    thread keeps all others from running. Returns the file's descriptor; -1 where there are no such files."""
    if not hasattr(os, "memfd_create"):
        return -1
    descriptor = os.memfd_create("stacks")
    faulthandler.register(DUMP, file=descriptor, all_threads=True)
    return descriptor
