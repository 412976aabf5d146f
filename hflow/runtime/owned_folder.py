"""A private temporary folder, gone with its owner, however that ends."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _nothing(_name: str) -> None:
    pass


class OwnedFolder:
    """A folder that only this user can read, removed by `remove`; or, if the owner was killed (SIGKILL, out
    of memory), by the next owner of a folder of the same kind on this machine."""

    def __init__(self, kind: str, forget: Callable[[str], None] = _nothing) -> None:
        """Make a folder ``hflow-KIND-…``; `forget`: also called, with its name, when it is removed."""
        self._forget = forget
        prefix = f"hflow-{kind}-"
        _remove_abandoned(prefix, forget)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))  # mode 0700
        # The system releases the lock when this process ends. The file gets its name when it is locked.
        self._lock = (self.path / "owner.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "owner.new").rename(self.path / "owner")

    def remove(self) -> None:
        """Twice is once. Processes that are ending may still write, so this looks again."""
        self._lock.close()
        self._forget(self.path.name)
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():
            time.sleep(0.5)
            shutil.rmtree(self.path, ignore_errors=True)


def _remove_abandoned(prefix: str, forget: Callable[[str], None]) -> None:
    for owner in Path(tempfile.gettempdir()).glob(f"{prefix}*/owner"):
        with suppress(OSError), owner.open("r+") as file:  # another user's, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            forget(owner.parent.name)
            shutil.rmtree(owner.parent, ignore_errors=True)
