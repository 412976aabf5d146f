"""A private temporary folder, gone with its owner, and with what bears its name in shared memory."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from hflow.runtime.engines.sglang.shared_memory import remove_of

PREFIX = "hflow-sglang-"


class Folder:
    """A folder that only this user can read, removed by `remove`; or, if the owner was killed, by the next
    owner of such a folder on this machine."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # The system releases the lock when this process ends, however that happens. The file gets its name
        # when it is locked.
        self._lock = (self.path / "owner.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "owner.new").rename(self.path / "owner")

    def remove(self) -> None:
        """Twice is once."""
        self._lock.close()
        remove_of(self.path.name)
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():  # a file was made meanwhile
            time.sleep(0.5)
            shutil.rmtree(self.path, ignore_errors=True)


def _remove_abandoned() -> None:
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/owner"):
        with suppress(OSError), owner.open("r+") as file:  # another user's, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_of(owner.parent.name)
            shutil.rmtree(owner.parent, ignore_errors=True)
