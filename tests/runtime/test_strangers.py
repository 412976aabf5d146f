"""Strangers at the ports by which workers meet: no code of theirs runs, and no run hangs for them."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.diagnostics import HflowError
from hflow.runtime.worker import proof
from hflow.runtime.worker.proof import CODE_BYTES, GroupKey
from hflow.runtime.worker.world import World
from tests.runtime.test_failures import FOLDER, Start, finish, start, wait_for_steps

__all__ = ["start"]
pytestmark = pytest.mark.slow
DEADLINE_S = 60
NUMBERS = 64  # that a gloo connection begins with: each process counts its own from 0
SECRET = b"of the world"


# Ranks that cannot prove who they are


def join(rank: int, port: int, said: Any, go_on: Any, change: Callable[[int], bytes]) -> None:
    """Meets the other rank and makes a group with it; where that is refused, meets it again as it should."""
    torch.set_num_threads(1)
    proof.ANSWER = timedelta(seconds=3)
    right = GroupKey.of_connection
    store, cpu = TCPStore("127.0.0.1", port, None, False), torch.device("cpu")
    try:
        world = World.join(PrefixStore("first", store), rank, 2, cpu, change(rank))
        said.put((rank, "joined"))
        go_on.wait()
        world.group((0, 1))
        said.put((rank, "grouped"))
        return
    except (HflowError, RuntimeError) as error:  # which keeps connections open as long as it is there
        refused = str(error)
    said.put((rank, refused))
    go_on.wait()  # until the other has been refused, too
    GroupKey.of_connection = right
    World.join(PrefixStore("second", store), rank, 2, cpu, b"of the second").group((0, 1))
    said.put((rank, "met again"))


def same(rank: int) -> bytes:
    return SECRET


def another(rank: int) -> bytes:
    return SECRET + bytes([rank])


def wrong_code(rank: int) -> bytes:
    """Rank 1 signs as it should, but its peers hear a wrong code."""
    right = GroupKey.of_connection

    def wrong(self: GroupKey, sender: int, receiver: int) -> bytes:
        return bytes(CODE_BYTES) if (sender, receiver) == (rank, 0) else right(self, sender, receiver)

    GroupKey.of_connection = wrong
    return SECRET


Meeting = Callable[[Callable[[int], bytes]], tuple[Any, Any, list[Any]]]


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    """Starts two ranks: what they say, the event that lets them make a group, and their processes."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    said, go_on = context.Queue(), context.Event()
    processes: list[Any] = []

    def begin(change: Callable[[int], bytes]) -> tuple[Any, Any, list[Any]]:
        arguments = (store.port, said, go_on, change)
        processes.extend(context.Process(target=join, args=(rank, *arguments)) for rank in range(2))
        for process in processes:
            process.start()
        return said, go_on, processes

    yield begin
    for process in processes:
        process.kill()
        process.join()


def heard(said: Any) -> dict[int, str]:
    return dict(said.get(timeout=DEADLINE_S) for _ in range(2))


def test_ranks_with_one_secret_meet(meeting: Meeting) -> None:
    said, go_on, _ = meeting(same)
    assert heard(said) == {0: "joined", 1: "joined"}
    go_on.set()
    assert heard(said) == {0: "grouped", 1: "grouped"}


def test_what_somebody_else_has_written_into_the_store_is_refused(meeting: Meeting) -> None:
    said, _, _ = meeting(another)
    assert all("HF404" in told and "has written" in told for told in heard(said).values())


def test_who_connects_without_the_code_is_refused(meeting: Meeting) -> None:
    """The other end learns that the connection is closed; then both meet again in the same processes."""
    said, go_on, _ = meeting(wrong_code)
    told = heard(said)
    assert "HF404" in told[0] and "has connected as rank 1 of 2" in told[0]
    assert "Connection closed by peer" in told[1] or "Connection reset" in told[1]
    go_on.set()
    assert heard(said) == {0: "met again", 1: "met again"}


def test_who_connects_first_takes_nobodys_place(meeting: Meeting) -> None:
    """Someone who says all the numbers that a rank may wait for, before the ranks make a group."""
    said, go_on, processes = meeting(same)
    assert set(heard(said).values()) == {"joined"}
    connections = [
        connected(address, number.to_bytes(8, "little"))
        for process in processes
        for address in listening(psutil.Process(process.pid))
        for number in range(NUMBERS)
    ]
    time.sleep(0.5)  # until the ranks have taken note of them
    go_on.set()
    told = heard(said).values()
    assert connections and all("HF402" in text and "says nothing" in text for text in told)


# The real command line


class Payload:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    with suppress(psutil.Error):
        found = process.net_connections("tcp")
        return [(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]
    return []


def connected(address: tuple[str, int], said: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=1)
    connection.sendall(said)
    return connection


def store_at(address: tuple[str, int]) -> TCPStore | None:
    with suppress(RuntimeError):
        return TCPStore(*address, None, False, timedelta(seconds=1), wait_for_workers=False)
    return None


class Stranger:
    """Somebody without the secret who reaches all ports of a command and its workers, until it has ended."""

    def __init__(self, process: Popen[str], marker: Path):
        self.process, self.payload = process, pickle.dumps(Payload(marker))
        self.written: set[str] = set()
        self.connections: list[socket.socket] = []
        self._seen: set[tuple[str, int]] = set()
        self._stores: dict[tuple[str, int], TCPStore] = {}
        self._thread = threading.Thread(target=self._attack, daemon=True)
        self._thread.start()

    def _attack(self) -> None:
        while self.process.poll() is None:
            with suppress(psutil.Error, OSError):
                self._once()
            time.sleep(0.02)

    def _once(self) -> None:
        controller = psutil.Process(self.process.pid)
        workers = [p for p in controller.children(recursive=True) if "RayWorker" in " ".join(p.cmdline())]
        for address in set(listening(controller)) - self._seen:
            self._seen.add(address)
            if store := store_at(address):
                self._stores[address] = store
        for address, store in tuple(self._stores.items()):
            try:
                self._write(store)
            except RuntimeError:
                del self._stores[address]
            self.connections.append(connected(address, self.payload))
        for address in {a for worker in workers for a in listening(worker)} - self._seen:
            self._seen.add(address)
            numbered = [number.to_bytes(8, "little") + self.payload for number in range(NUMBERS)]
            for said in (self.payload, b"\xff" * 64, *numbered):
                with suppress(OSError):
                    self.connections.append(connected(address, said))

    def _write(self, store: TCPStore) -> None:
        guessed = [f"world1/{group}//cpu//0/{rank}" for group in range(4) for rank in range(2)]
        for key in {*store.list_keys(), *guessed}:
            store.set(key, self.payload)  # type: ignore[arg-type]
            self.written.add(key)


def run_of(start: Start, model: Path, run_dir: Path) -> Popen[str]:
    two_workers = "--pin", "actor_train=dp2@0-1", "--pin", "rollout=tp2@0-1", "--set", "params.steps=6"
    return start(FOLDER / "grpo_small.yaml", model, run_dir, *two_workers)


@pytest.mark.rotating(6)
@pytest.mark.parametrize(
    "steps", [0, pytest.param(1, marks=pytest.mark.acceptance)], ids=["from the start", "after a step"]
)
def test_a_stranger_runs_no_code_and_hangs_no_run(
    start: Start, tiny_model: Path, tmp_path: Path, steps: int
) -> None:
    """The run goes on, or ends with a diagnostic."""
    marker, run_dir = tmp_path / "marker", tmp_path / "run"
    process = run_of(start, tiny_model, run_dir)
    if steps:
        wait_for_steps(process, run_dir, steps)
    stranger = Stranger(process, marker)
    code, output = finish(process)
    assert stranger.written and stranger.connections
    assert not marker.exists()
    assert code == 0 or (code == 1 and "error[HF4" in output), output
    assert "Traceback" not in output


def test_the_payload_would_make_the_file(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()
