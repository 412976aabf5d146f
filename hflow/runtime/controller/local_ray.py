"""The environment of a Ray that hflow starts for itself. Ray reads it when it is first imported, so this
module imports nothing of Ray, and `ray_pool` is imported only afterwards."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from hflow.diagnostics import HflowError
from hflow.runtime.openmp import sleep_soon
from hflow.runtime.owned_folder import OwnedFolder
from hflow.whole_file import unwritten

_TOKEN = secrets.token_hex(32)  # of all runs of this process: Ray remembers the first that it has read

END_S = 5.0  # for killed processes to end
# Ray's own limits, a minute at most, are of an idle machine: on cores that others use, the imports of its
# Python processes take longer, and those that it started anew for it would, too.
START_S = 600
PATIENCE = {
    "RAY_agent_register_timeout_ms": str(1000 * START_S),
    "RAY_worker_register_timeout_seconds": str(START_S),
}
VITAL = ("gcs_server", "raylet")  # Ray cannot do without: a minute later it ends this very process


class LocalRay:
    """A temporary folder for Ray's files, with its access token; `remove` it after Ray has ended.

    Ray then listens on loopback only (it has no setting for that; the first variable makes a
    single-host Ray do so for every port), asks for a token that only this user can read, and sends no
    usage statistics.
    """

    def __init__(self) -> None:
        """HF404 where the folder cannot be made."""
        try:
            self._private = OwnedFolder("ray", forget=_end_its_ray)
        except OSError as error:
            raise _unmade(error) from None
        self.folder = self._private.path / "ray"  # Ray opens its own folder to everybody
        self._vital: dict[str, psutil.Process] = {}
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray's own default is 15: beside other load, workers would hardly get a core
        os.environ.setdefault("RAY_worker_niceness", "0")
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        sleep_soon()
        if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
            return  # the program around us imported Ray with its own settings
        token = self._private.path / "token"
        try:
            token.touch(mode=0o600)
            token.write_text(_TOKEN)
        except OSError as error:
            self.remove()
            raise _unmade(error) from None
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def processes(self) -> list[psutil.Process]:
        """Those of the Ray whose files these are, with what they have started."""
        own = {process.pid: process for process in _processes(self._private.path.name)}
        for process in list(own.values()):
            with suppress(psutil.Error):
                own |= {child.pid: child for child in process.children(recursive=True)}
        return list(own.values())

    def dead(self) -> list[str]:
        """Which of the processes do not run that Ray cannot do without."""
        if not self._vital.keys() >= {*VITAL}:  # looking for them takes long
            self._vital = {_name(process): process for process in self.processes()}
        dead = [name for name in VITAL if name not in self._vital or _name(self._vital[name]) != name]
        if dead:
            self._vital = {}
        return dead

    def remove(self) -> None:
        self._private.remove()


def _unmade(error: OSError) -> HflowError:
    return unwritten(Path(tempfile.gettempdir()) / "hflow-ray-…", error, "HF404")


def _end_its_ray(folder: str) -> None:
    """Ray's processes that are left: when a run is killed while they start, some go on for a minute, and make
    the folder anew."""
    left = list(_processes(folder))
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=END_S)


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name() if process.status() != psutil.STATUS_ZOMBIE else ""
    return ""


def _processes(folder: str) -> Iterator[psutil.Process]:
    """Those of the Ray whose folder it is, but this one. Titles do not tell, but all have logs there."""
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with suppress(psutil.Error):
            of_ray = any(word.startswith("ray::") or "/ray/" in word for word in process.cmdline()[:2])
            if of_ray and any(folder in Path(file.path).parts for file in process.open_files()):
                yield process
