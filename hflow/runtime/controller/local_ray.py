"""The environment of a Ray that hflow starts for itself. Ray reads it when it is first imported, so this
module imports nothing of Ray, and `ray_pool` is imported only afterwards."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

PREFIX = "hflow-"


_TOKEN = secrets.token_hex(32)  # of all runs of this process: Ray remembers the first that it has read


class LocalRay:
    """A temporary folder for Ray's files, with its access token; `remove` it after Ray has ended.

    Ray then listens on loopback only (it has no setting for that; the first variable makes a
    single-host Ray do so for every port), asks for a token that only this user can read, and sends no
    usage statistics. Folders of runs that were killed (SIGKILL, out of memory) are removed first.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self._private = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
        self._lock = _lock(self._private)
        self.folder = self._private / "ray"  # Ray opens its own folder to everybody
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
            return  # the program around us imported Ray with its own settings
        token = self._private / "token"
        token.touch(mode=0o600)
        token.write_text(_TOKEN)
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def remove(self) -> None:
        """Ray's last processes may still write while they end, so this looks twice."""
        self._lock.close()
        shutil.rmtree(self._private, ignore_errors=True)
        if self._private.exists():
            time.sleep(0.5)
            shutil.rmtree(self._private, ignore_errors=True)


def _lock(folder: Path) -> IO[str]:
    """A file that says, by its lock, that somebody uses the folder: the system releases it when the process
    ends, however that happens. It gets its name when it is locked."""
    file = (folder / "owner.new").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    (folder / "owner.new").rename(folder / "owner")
    return file


def _remove_abandoned() -> None:
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/owner"):
        with suppress(OSError), owner.open("r+") as file:  # another user's, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)
