"""Files of tensors that this process has shared with others: if it is killed, they stay."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

MANAGER = "torch_shm_manager"  # the process that PyTorch starts with the first tensor that it shares
END_S = 5.0  # for it to end
SHARED_MEMORY = Path("/dev/shm")


def remove_own() -> None:
    """Of what this process has shared with its engines' servers. A handle that no server has opened, since it
    refused an update, would keep its memory beyond the end of both.

    Only just before this process is killed: PyTorch aborts when it frees memory whose file is gone.
    """
    _end_manager()
    for file in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"):
        file.unlink(missing_ok=True)


def _end_manager() -> None:
    """Killed here, it does not miss its own temporary folder, which goes with this process's."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if Path(child.cmdline()[0]).name == MANAGER:
                child.kill()
                child.wait(END_S)
