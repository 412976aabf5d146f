"""SGLang's files in shared memory: who is killed leaves them there."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "sglang_"


def remove_at_end() -> None:
    """Have those that this process and its children have open removed when these have ended, however that is.

    multiprocessing has a process for that, which outlives them.
    """
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        for name in _names(process.pid):
            resource_tracker.register(f"/{name}", "shared_memory")


def _names(pid: int) -> set[str]:
    names: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            file = descriptor.readlink()
            names |= {file.name} if file.parent == SHARED_MEMORY and file.name.startswith(PREFIX) else set()
    return names
