"""Files in shared memory, SGLang's and those of weights on their way there: killed processes leave them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "sglang_"


def remove_names() -> None:
    """Of those that this process and its children have open: so they serve on, and are gone with these."""
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        for file in _open_files(process.pid):
            file.unlink(missing_ok=True)


def remove_own() -> None:
    """Of what this process has shared with its servers. A handle that no server has opened, since it refused
    an update, would keep its memory beyond the end of both.

    Only just before this process is killed: PyTorch aborts when it frees memory whose file is gone.
    """
    for file in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"):
        file.unlink(missing_ok=True)


def _open_files(pid: int) -> set[Path]:
    found: set[Path] = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            found.add(descriptor.readlink())
    return {file for file in found if file.parent == SHARED_MEMORY and file.name.startswith(PREFIX)}
