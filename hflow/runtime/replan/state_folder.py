"""Where a run's state lies while its workers change plans: in memory, where all of them see the same, else in
the run folder."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hflow.runtime.controller.pool import Pool
from hflow.runtime.owned_folder import OwnedFolder

SHARED_MEMORY = Path("/dev/shm")
KIND_OF_STATE = "state"  # of owned folders
SWITCHING = ".switching"  # in the run folder
MARGIN = 1.2  # a file is a little larger than its tensors
COPIES = 3  # workers' copies, the files, and models that are built beside them


@contextmanager
def state_folder(run: Path, pool: Pool, size_bytes: int, is_one_host: bool) -> Iterator[Path]:
    """A folder for `size_bytes` of state that goes with the block. All workers see it, also those that the
    present plan does not use.

    Args:
        run: the run folder, which they share.
        is_one_host: whether all are on one host, which may be another than this one.
    """
    if is_one_host and _has_room(SHARED_MEMORY, size_bytes):
        owned = OwnedFolder(KIND_OF_STATE, parent=SHARED_MEMORY)
        try:
            if _is_seen(owned.path, pool):
                yield owned.path
                return
        finally:
            owned.remove()
    folder = run / SWITCHING
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(memory: Path, size_bytes: int) -> bool:
    """Its files are in the host's memory, of which the workers' copies and new models need some, too."""
    if not memory.is_dir():
        return False
    free = shutil.disk_usage(memory).free
    return free > MARGIN * size_bytes and psutil.virtual_memory().available > COPIES * size_bytes


def _is_seen(folder: Path, pool: Pool) -> bool:
    """Whether all workers find a file that is made here, and can make one beside it."""
    mark = folder / f".seen-{secrets.token_hex(16)}"
    mark.touch()
    reports = pool.call("look_for", str(mark))
    mark.unlink()
    return not any(report["problem"] for report in reports)
