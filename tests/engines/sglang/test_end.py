"""Servers that die, whose parents die, or that never start: told with the cause, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hflow.runtime.engines.sglang.server import Server, ServerError
from tests.engines.models import Folders, some_prompts
from tests.engines.sglang.servers import (
    files_of,
    gone,
    options,
    short_folder,
    temporary_files_in,
    tree_of,
    within,
)
from tests.engines.sglang.test_server import generate, listening
from tests.installed import needs_sglang

pytestmark = [needs_sglang, pytest.mark.slow]


@pytest.fixture(autouse=True)
def temporary() -> Iterator[Path]:
    with short_folder() as folder, temporary_files_in(folder):
        yield folder


@pytest.mark.rotating(6)
def test_two_ranks_generate_and_the_death_of_one_is_the_servers(folders: Folders, temporary: Path) -> None:
    """As one rank does; each on cores of its own; then one is killed."""
    model = folders.of("qwen2", False)
    cores = sorted(os.sched_getaffinity(0))[:2]
    server = Server.start(options(model, tp=2, cores=tuple(cores)))
    try:
        processes = tree_of(server._tree.pid)  # type: ignore[union-attr]
        shared = files_of(processes)
        ranks = [p for p in processes if "scheduler" in p.name()]
        assert sorted(rank.cpu_affinity() for rank in ranks) == [[cores[0]], [cores[-1]]]
        assert {address for address, _ in listening(server)} == {"127.0.0.1"}
        seeded = [{"temperature": 1.0, "sampling_seed": i} for i in range(4)]
        first = generate(server, some_prompts(4), seeded)
        assert [len(a["output_ids"]) for a in first] == [12] * 4
        assert [a["output_ids"] for a in generate(server, some_prompts(4), seeded)] == [
            a["output_ids"] for a in first
        ]

        asked = threading.Thread(target=_ask_until_it_fails, args=(server, failures := []))
        asked.start()
        ranks[1].kill()
        assert within(3, lambda: not server.alive) and not server.healthy()
        asked.join(15)
        # said by SGLang of the rank, or, if it was faster, by the other rank
        assert re.search(r"SGLang died: .*(crashed with exit code -9|by peer)", failures[0])
        with pytest.raises(ServerError, match="^/flush_cache: SGLang died: "):
            server.post("/flush_cache")
    finally:
        server.close()
    assert gone(processes) and list(temporary.iterdir()) == []
    assert shared and not any("sglang" in file.name for file in shared if file.exists())


def _ask_until_it_fails(server: Server, failures: list[str]) -> None:
    try:
        while True:
            generate(server, some_prompts(16), [{"temperature": 1.0}] * 16)
    except ServerError as error:
        failures.append(str(error))


def _owner(model: str) -> subprocess.Popen[str]:
    """A process that starts a server from a thread that has ended since, and then waits."""
    program = f"""
import sys, threading, time
from hflow.runtime.engines.sglang.server import Server
from tests.engines.sglang.servers import options
servers = []
thread = threading.Thread(target=lambda: servers.append(Server(options({model!r}))))
thread.start()
thread.join()
print(servers[0]._tree.pid, flush=True)
servers[0]._wait(lambda text: None)
print("ready", servers[0].healthy(), flush=True)
time.sleep(600)
"""
    path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "starting"])
def test_a_server_ends_with_its_parent(folders: Folders, temporary: Path, ready: bool) -> None:
    """Killed when it is ready, or while SGLang's children still start."""
    owner = _owner(folders.of("qwen2", False))
    assert owner.stdout is not None
    first = int(owner.stdout.readline())
    if ready:
        assert owner.stdout.readline() == "ready True\n"
    else:
        assert within(60, lambda: len(tree_of(first)) >= 3)
    processes = tree_of(first)
    shared = files_of(processes)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert gone(processes)
    # only its folder and what is named after that is left, and the next server here removes it
    [folder], left = temporary.iterdir(), {file for file in shared if file.exists()}
    assert all(folder.name in file.name for file in left) and bool(left) >= ready
    with pytest.raises(ServerError):
        Server.start(options("/nowhere"))
    assert list(temporary.iterdir()) == [] and not any(file.exists() for file in left)


def test_a_model_that_is_not_there(tmp_path: Path, temporary: Path) -> None:
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(ServerError, match=f"while it started: FileNotFoundError: .*{tmp_path}/config.json"):
        Server.start(options(str(tmp_path)))
    assert list(temporary.iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) <= children


def test_what_sglang_says_about_a_model_without_weights(
    folders: Folders, tmp_path: Path, temporary: Path
) -> None:
    config = Path(folders.of("qwen2", False)) / "config.json"
    (tmp_path / "config.json").write_text(config.read_text())
    begin = time.monotonic()
    with pytest.raises(ServerError, match="RuntimeError: Cannot find any model weights") as raised:
        Server.start(options(str(tmp_path)))
    assert "The end of its log:\n  " in str(raised.value)
    assert time.monotonic() - begin < 120 and list(temporary.iterdir()) == []


def test_requests_longer_than_the_model_are_refused(folders: Folders) -> None:
    with pytest.raises(ServerError, match="requests of 65 tokens, but the model has 64 positions"):
        Server.start(options(folders.of("qwen2", False), max_length=65))
