"""A worker's temporary files, with those of PyTorch and of packages that it imports, go with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hflow.runtime.owned_folder import OwnedFolder, remove_abandoned
from tests.engines.sglang.servers import short_folder, temporary_files_in, within

# Prints its process's number and what is in its folder, and ends as Ray ends workers.
WORKER = """
import os, signal, sys, tempfile
from contextlib import suppress

import psutil, torch

from hflow.runtime.engines.sglang.share import handle
from hflow.runtime.engines.shared_memory import MANAGER, remove_own
from hflow.runtime.owned_folder import OwnedFolder

outer = tempfile.gettempdir()
folder = OwnedFolder("worker")
folder.take_temporary_files()
with suppress(ImportError):
    import wandb  # makes two folders
tempfile.mkstemp(prefix="own-")
shared = handle("weights", torch.zeros(3))
print(os.getpid(), *sorted(os.listdir(folder.path)), flush=True)
server = OwnedFolder("sglang")
assert str(server.path.parent) == outer
server.remove()
(manager,) = psutil.Process().children()
assert manager.cmdline()[0].endswith(MANAGER)
if sys.argv[1] == "told":
    remove_own()
    folder.remove()
if sys.argv[1] == "with its manager":
    manager.kill()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["told", "killed", "with its manager"])
def test_nothing_stays_of_a_worker(ends: str) -> None:
    """Ray kills workers, and what they have started. One that was told has removed its folder before; that of
    another goes with the pool, or with the next worker."""
    with short_folder() as folder, temporary_files_in(folder):
        command = [sys.executable, "-c", WORKER, ends]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == -9, done.stderr
        pid, *made = done.stdout.split()
        prefixes = {name[:4] for name in made}
        assert {"torc", "own-"} <= prefixes, made
        if ends != "told":
            assert [path.name[:13] for path in folder.iterdir()] == ["hflow-worker-"]
            remove_abandoned("worker")
        assert not list(folder.iterdir())
        if ends != "with its manager":  # else, nobody is left who would
            assert within(10.0, lambda: not list(Path("/dev/shm").glob(f"torch_{pid}_*")))
        for file in Path("/dev/shm").glob(f"torch_{pid}_*"):
            file.unlink()


def test_temporary_files_stay_where_names_of_sockets_would_be_too_long(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    with temporary_files_in(long):
        folder = OwnedFolder("worker")
        folder.take_temporary_files()
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(long)
        folder.remove()
        assert not list(long.iterdir())
