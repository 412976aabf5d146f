"""A private temporary folder, gone with its owner, however that ends."""

from __future__ import annotations

import fcntl
import getpass
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

OWNER = "owner"
LOOKS, LOOK_S = 6, 0.5
LONGEST_NAME = 107  # of a Unix socket, in bytes
SOCKET = "torch-shm-dir-XXXXXX/manager.sock"  # PyTorch's: of those in temporary folders, the longest
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"

_place: Path | None = None  # of owned folders, where another folder has become the temporary one


def _nothing(_name: str) -> None:
    pass


class OwnedFolder:
    """A folder that only this user can read, removed by `remove`; or, if the owner was killed (SIGKILL, out
    of memory), by the next owner of a folder of the same kind on this machine."""

    def __init__(
        self, kind: str, forget: Callable[[str], None] = _nothing, parent: Path | None = None
    ) -> None:
        """Make a folder ``hflow-KIND-…``; `forget`: also called, with its name, when it is removed. `parent`:
        where; None: beside other temporary files."""
        self._forget = forget
        remove_abandoned(kind, forget, parent)
        self.path = Path(tempfile.mkdtemp(prefix=_prefix(kind), dir=parent or _parent()))  # mode 0700
        # The system releases the lock when this process ends. The file gets its name when it is locked.
        self._lock = (self.path / f"{OWNER}.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / f"{OWNER}.new").rename(self.path / OWNER)

    def take_temporary_files(self) -> None:
        """From now on the temporary files of this process, and of those that it starts, are in here, but for
        what PyTorch has compiled, which serves later runs. Owned folders still lie beside this one: there the
        next owner looks for what is left of them.

        Where names of sockets would become too long, temporary files stay where they are.
        """
        global _place
        if len(os.fsencode(self.path / SOCKET)) > LONGEST_NAME:
            return
        _place = self.path.parent
        os.environ.setdefault(INDUCTOR, str(_place / f"torchinductor_{_user()}"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.path)

    def remove(self) -> None:
        """Twice is once. The lock is kept to the end: nobody else removes it meanwhile."""
        self._forget(self.path.name)
        if self.path.exists():
            _erase(self.path)
        self._lock.close()


def remove_abandoned(kind: str, forget: Callable[[str], None] = _nothing, parent: Path | None = None) -> None:
    """Remove folders of this kind whose owners have ended; as for `OwnedFolder`."""
    for owner in (parent or _parent()).glob(f"{_prefix(kind)}*/{OWNER}"):
        with suppress(OSError), owner.open("r+") as file:  # another user's, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            forget(owner.parent.name)
            _erase(owner.parent)


def _prefix(kind: str) -> str:
    return f"hflow-{kind}-"


def _parent() -> Path:
    return _place or Path(tempfile.gettempdir())


def _user() -> str:
    """As PyTorch has it in the name of that folder."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a user without a name
        return f"uid_{os.getuid()}"


def _erase(folder: Path) -> None:
    """Processes that are ending may still write, so this looks several times. The owner's file goes last: by
    it the next owner finds what is left even then."""
    for _ in range(LOOKS):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != OWNER:
                path.unlink(missing_ok=True)
        if _removed(folder):
            return
        time.sleep(LOOK_S)


def _removed(folder: Path) -> bool:
    """Remove a folder that has the owner's file alone. What is written into it between the two steps keeps
    it: then it has that file again, which nobody locks."""
    if any(path.name != OWNER for path in folder.iterdir()):
        return False
    (folder / OWNER).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:
        (folder / OWNER).touch()
        return False
    return True
