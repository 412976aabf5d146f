"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of process `parent` that started it ends.

    A parent that died before this call can send no signal any more: then this process ends here.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def forks_die_with_their_parents() -> None:
    """Have `die_with` called in every process that is forked from this one or from such a fork."""
    parent = os.getpid()

    def forked() -> None:
        nonlocal parent
        die_with(parent)
        parent = os.getpid()

    os.register_at_fork(after_in_child=forked)
