"""A private temporary folder, gone with its owner, however that ends."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

OWNER = "owner"
LOOKS, LOOK_S = 6, 0.5


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
        self._lock = (self.path / f"{OWNER}.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / f"{OWNER}.new").rename(self.path / OWNER)

    def remove(self) -> None:
        """Twice is once. The lock is kept to the end: nobody else removes it meanwhile."""
        self._forget(self.path.name)
        if self.path.exists():
            _erase(self.path)
        self._lock.close()


def _remove_abandoned(prefix: str, forget: Callable[[str], None]) -> None:
    for owner in Path(tempfile.gettempdir()).glob(f"{prefix}*/{OWNER}"):
        with suppress(OSError), owner.open("r+") as file:  # another user's, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            forget(owner.parent.name)
            _erase(owner.parent)


def _erase(folder: Path) -> None:
    """Processes that are ending may still write, so this looks several times. The owner's file goes last: by
    it the next owner finds what is left even then."""
    for _ in range(LOOKS):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != OWNER:
                path.unlink(missing_ok=True)
        if all(path.name == OWNER for path in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
            return
        time.sleep(LOOK_S)
