"""Waits that are given up: real processes, one of which is killed while the others wait."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.runtime.worker.world import Aborted, World

DEADLINE_S = 60  # gloo itself would wait for ten minutes
CPU = torch.device("cpu")


def message(world: World, group: dist.ProcessGroup) -> None:
    """From the other rank, larger than what a socket holds; and one to it."""
    numbers = torch.zeros(2**22), torch.ones(2**22)
    list(world.messages([(1 - world.rank, numbers[0])], [(1 - world.rank, numbers[1])], group))


def exchange(world: World, group: dist.ProcessGroup) -> None:
    world.exchange([torch.ones(1), torch.ones(1)], [1, 1], group)


def collective_of_an_engine(world: World, group: dist.ProcessGroup) -> None:
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        raise world.explain(error) from error


WAITS = (message, exchange, collective_of_an_engine)


def on_rank(rank: int, path: str, wait: Callable[..., None], gave_up: Any, said: Any) -> None:
    """Rank 2 dies. Rank 1 waits for it, learns that, and stays silent. Rank 0 waits for rank 1 and is told to
    give up. Then ranks 0 and 1 meet again."""
    torch.set_num_threads(1)
    world = World.join(PrefixStore("first", FileStore(path)), rank, 3, CPU)
    everyone, pair = world.group((0, 1, 2)), world.group((0, 1))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        with pytest.raises(RuntimeError, match="Connection closed|Connection reset|Broken pipe"):
            list(world.messages([(2, torch.zeros(1))], [], everyone))
        gave_up.wait()
    else:
        threading.Timer(0.5, world.abort).start()
        with pytest.raises(Aborted):
            wait(world, pair)
        with pytest.raises(Aborted):  # and nothing waits afterwards
            wait(world, pair)
        gave_up.set()
    world.close()
    world = World.join(PrefixStore("second", FileStore(path)), rank, 2, CPU)
    found = world.exchange([torch.full((1,), rank)] * 2, [1, 1], world.group((0, 1)))
    said.put((rank, [int(t) for t in found]))
    world.close()


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
def test_waits_end_when_told_and_the_processes_go_on(wait: Callable[..., None], tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    gave_up, said = context.Event(), context.Queue()
    arguments = (str(tmp_path / "store"), wait, gave_up, said)
    processes = [context.Process(target=on_rank, args=(rank, *arguments)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL]
    assert dict(said.get() for _ in range(2)) == {0: [0, 1], 1: [0, 1]}


def count_loops(rank: int, path: str, counts: Any) -> None:
    world = World.join(FileStore(path), rank, 3, CPU)
    for ranks in ((0, 1), (1, 2), (0, 1, 2), (rank,)):
        world.group(ranks)
    dist.all_reduce(torch.ones(1), group=world.group((0, 1, 2)))
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    counts.put((names.count("gloo_tcp_loop"), names.count("pt_gloo_runloop")))
    world.close()


@pytest.mark.slow
def test_all_groups_share_one_loop(tmp_path: Path) -> None:
    """Each has threads for its collectives; those show that torch has named its threads."""
    context = multiprocessing.get_context("spawn")
    counts = context.Queue()
    path = str(tmp_path / "store")
    ranks = [context.Process(target=count_loops, args=(rank, path, counts)) for rank in range(3)]
    for process in ranks:
        process.start()
    found = [counts.get(timeout=DEADLINE_S) for _ in ranks]
    for process in ranks:
        process.join(DEADLINE_S)
    assert all(loops == 1 and collectives >= 6 for loops, collectives in found), found
