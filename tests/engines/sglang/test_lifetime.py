"""Forks that end with the process that they were forked from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.engines.sglang.servers import gone

ROOT = Path(__file__).parents[3]
FORKS = """
import os, signal, sys
from hflow.runtime.engines.lifetime import forks_die_with_their_parents
if sys.argv[1] == "bound":
    forks_die_with_their_parents()
print(os.getpid(), flush=True)
for _ in range(2):  # a child, and a child of the child
    if os.fork():
        signal.pause()
    print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "free"])
def test_forks_end_with_the_process_that_they_come_from(bound: bool) -> None:
    """And forks of forks with these; unlike those of a process that has not asked for it."""
    command = [sys.executable, "-c", FORKS, "bound" if bound else "free"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert first.stdout is not None
    processes = [psutil.Process(int(first.stdout.readline())) for _ in range(3)]
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    if bound:
        assert gone(processes)
        return
    assert all(process.is_running() for process in processes[1:])
    for process in processes[1:]:
        process.kill()
