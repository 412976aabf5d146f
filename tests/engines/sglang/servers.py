"""What tests of servers share: their options, and what the system says about their processes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from hflow.runtime.engines.sglang.options import ServerOptions
from tests.engines.sglang.loader import LOADER

SHARED_MEMORY = "/dev/shm/"
MAX_LENGTH = 64  # of the tiny models
GONE_S = 10.0


def options(model_path: str, **other: Any) -> ServerOptions:
    """A small server on CPUs."""
    given = {
        "dtype": "float32", "tp": 1, "devices": (), "cores": (), "max_running": 16, "max_tokens": 2048,
        "max_length": MAX_LENGTH, "seed": 0, "sleeps": False, "weight_loader": LOADER,
    }  # fmt: skip
    return ServerOptions(model_path, **(given | other))


def tree_of(first: int) -> list[psutil.Process]:
    """The process and all that come from it."""
    process = psutil.Process(first)
    return [process, *process.children(recursive=True)]


def lives(process: psutil.Process) -> bool:
    """An orphan that nobody has reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def gone(processes: list[psutil.Process]) -> bool:
    return within(GONE_S, lambda: not any(map(lives, processes)))


def files_of(processes: list[psutil.Process]) -> set[Path]:
    """Those in shared memory that they have mapped; the names of removed ones end in "(deleted)". While a
    server starts, some of its processes end soon: these have none."""
    paths: set[str] = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # psutil.ZombieProcess is one of these
            paths |= {mapped.path for mapped in process.memory_maps()}
    return {Path(path) for path in paths if path.startswith(SHARED_MEMORY)}


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Those of this process and of what it starts; so servers of others are left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield


@contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder with a short name, as the names of sockets in it are limited."""
    with tempfile.TemporaryDirectory(prefix="h") as folder:
        yield Path(folder)
