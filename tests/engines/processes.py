"""Four processes that stay alive between tests and run functions as the ranks of a gloo world."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from hflow.runtime.engines.groups import NewGroup

SIZE = 4
TIMEOUT_S = 600  # beside other load on the same cores, imports alone take minutes


class RankError(AssertionError):
    """A rank raised; the message carries its traceback."""


class Pool:
    """Runs ``function(rank, new_group, *args)`` on the first ranks of the pool."""

    def __init__(self) -> None:
        self._start()

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results by rank. `function` is importable by name; arguments and results are pickled."""
        with tempfile.TemporaryDirectory() as folder:
            if not all(process.is_alive() for process in self.processes):
                self._restart()  # a library has ended one
            for rank in range(world):
                self.pipes[rank].send_bytes(pickle.dumps((function, rank, world, folder, args)))
            results: dict[int, Any] = {}
            while len(results) < world:
                results |= self._receive({r: self.pipes[r] for r in range(world) if r not in results})
        return [results[rank] for rank in range(world)]

    def _receive(self, pipes: dict[int, Connection]) -> dict[int, Any]:
        ready = wait(list(pipes.values()), TIMEOUT_S)
        received: dict[int, Any] = {}
        for rank, pipe in pipes.items():
            if pipe not in ready:
                continue
            ok, result = pickle.loads(pipe.recv_bytes())
            if not ok:
                self._restart()
                raise RankError(f"rank {rank}:\n{result}")
            received[rank] = result
        if not received:
            self._restart()
            raise RankError(f"ranks {sorted(pipes)} gave no answer for {TIMEOUT_S} s")
        return received

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(SIZE)]
        self.pipes = [mine for mine, _ in ends]
        self.processes = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in ends]
        for process in self.processes:
            process.start()

    def _restart(self) -> None:
        """After a failure the other ranks may wait in a collective: begin afresh."""
        self.close()
        self._start()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            function, rank, world, folder, args = pickle.loads(pipe.recv_bytes())
            try:
                with _world(rank, world, folder):
                    answer = (True, function(rank, _new_group(), *args))
            except Exception:
                answer = (False, traceback.format_exc())
            pipe.send_bytes(pickle.dumps(answer))


@contextlib.contextmanager
def _world(rank: int, world: int, folder: str) -> Iterator[None]:
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    try:
        yield
        dist.barrier()  # a rank that is done must not leave while others are still connecting groups
    finally:
        dist.destroy_process_group()


def _new_group() -> NewGroup:
    @functools.cache
    def new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks))
        return cast(dist.ProcessGroup, group)

    return new_group
