"""Files of tensors that this process has shared with others: if it is killed, they stay."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_own() -> None:
    """Of what this process has shared with its engines' servers. A handle that no server has opened, since it
    refused an update, would keep its memory beyond the end of both.

    Only just before this process is killed: PyTorch aborts when it frees memory whose file is gone.
    """
    for file in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"):
        file.unlink(missing_ok=True)
