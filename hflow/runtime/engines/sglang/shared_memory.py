"""Files in shared memory, SGLang's and those of weights on their way there: killed processes leave them."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_of(instance: str) -> None:
    """SGLang's own, which bear the name of the server. Processes that still have them open serve on."""
    for file in SHARED_MEMORY.glob(f"sglang_*_{instance}_*"):
        file.unlink(missing_ok=True)


def remove_own() -> None:
    """Of what this process has shared with its servers. A handle that no server has opened, since it refused
    an update, would keep its memory beyond the end of both.

    Only just before this process is killed: PyTorch aborts when it frees memory whose file is gone.
    """
    for file in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"):
        file.unlink(missing_ok=True)
