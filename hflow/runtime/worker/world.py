"""The torch.distributed world that the workers of a plan share, and waits that can be given up.

Devices of a plan are ranks of the world. Every process group is made by all ranks in the same order
and kept; groups are cached by their ranks. A rank that waits for another when a third one dies would
wait for the backend's timeout: `abort`, called from another thread, closes all connections, and whatever
waits for them ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from hflow.runtime.cores import Cores, allowed
from hflow.runtime.engines.protocol import Stopped
from hflow.runtime.worker import cross_memory
from hflow.runtime.worker.cross_memory import Neighbours, RowsInMemory
from hflow.runtime.worker.gloo import register
from hflow.runtime.worker.shared_cores import agree

TIMEOUT = timedelta(days=1)  # a rollout elsewhere may take hours; who dies is told by `abort`, not by time
ABORT_TAG = 2**16  # of a message that nobody sends
CLOSED = "Application timeout caused pair closure"  # what gloo says to all but the one that timed out


class Aborted(Exception):  # noqa: N818  (it is what happened)
    """The controller told this worker to give up: another worker failed."""


@dataclass(frozen=True)
class Peers:
    """The ranks of one exchange and their process group (ranks ascending)."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup


class World:
    """The present world as `rank` sees it; `close` it before joining the next. `neighbours`: whose memory is
    read instead of waiting for messages. `cores`: of the ranks of this machine."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        neighbours: Neighbours | None = None,
        cores: Mapping[int, Cores] | None = None,
    ):
        self.rank, self.size, self.device = rank, size, device
        self.neighbours = neighbours or Neighbours()
        self.cores = cores or {rank: allowed()}
        self.aborted = threading.Event()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @staticmethod
    def join(store: Store, rank: int, size: int, device: torch.device, secret: bytes = b"") -> World:
        """Meet the other ranks at `store`; blocks until all are there.

        Args:
            secret: of this world alone, known to its ranks and to nobody else. An empty one keeps nobody out.

        Raises:
            HflowError: HF404: somebody without the secret takes part; HF402: a rank is silent. As `group`.
        """
        gloo = register(secret)
        backend = f"cpu:{gloo},cuda:nccl" if device.type == "cuda" else gloo
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
            neighbours = cross_memory.meet(rank, size) if device.type == "cpu" else None
            return World(rank, size, device, neighbours, agree(rank, size))
        except BaseException:
            _leave()
            raise

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of `ranks`, in ascending order of ranks. Collective over the whole world when new."""
        key = tuple(sorted(ranks))
        if key not in self._groups:
            made = dist.new_group(list(key), timeout=TIMEOUT)
            assert isinstance(made, dist.ProcessGroup) or self.rank not in key
            self._groups[key] = made  # pyright: ignore[reportArgumentType]
        return self._groups[key]

    def exchange(self, sends: list[Tensor], sizes: list[int], group: dist.ProcessGroup) -> list[Tensor]:
        """Uneven all-to-all of 1-D tensors of one dtype and device.

        Args:
            sends: what goes to each rank of the group.
            sizes: how many elements come from each rank.

        Returns:
            What came from each rank: views of one buffer.

        Raises:
            Aborted: when the controller gave the step up meanwhile.
        """
        incoming = sends[0].new_empty(sum(sizes))
        with self._giving_up():
            dist.all_to_all_single(incoming, torch.cat(sends), sizes, [len(t) for t in sends], group=group)
        return list(incoming.split(sizes))

    def messages(
        self,
        receives: Sequence[tuple[int, Tensor]],
        sends: Iterable[tuple[int, Tensor]],
        group: dist.ProcessGroup,
    ) -> Iterator[int]:
        """Messages between pairs of ranks, straight out of and into contiguous tensors.

        Those from one rank to another arrive in the order in which both name them. All receives are posted
        first; each of `sends` is on its way before the next is asked for, so that it may be made then.

        Args:
            receives, sends: the other rank, and the tensor.

        Yields:
            The number of each of `receives`, in order, when it is there.

        Raises:
            Aborted: when the controller gave the step up meanwhile.
        """
        with self._giving_up():
            if self.device.type == "cuda":  # NCCL runs what is started together
                every = [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in receives]
                every += [dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in sends]
                for work in dist.batch_isend_irecv(every) if every else ():
                    work.wait()
                yield from range(len(receives))
                return
            coming = [dist.irecv(tensor, peer, group) for peer, tensor in receives]
            going = [dist.isend(tensor, peer, group) for peer, tensor in sends]
            for number, work in enumerate(coming):
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]
                yield number
            for work in going:
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]

    def read(self, rank: int, places: Sequence[RowsInMemory], views: Sequence[Tensor]) -> None:
        """Fill views from where their values lie in the memory of a neighbour, who waits meanwhile.

        Raises:
            Aborted: when the controller gave the step up.
        """
        with self._giving_up():
            try:
                cross_memory.read(self.neighbours.pids[rank], places, views)
            except OSError as error:  # as gloo says it
                raise RuntimeError(f"Connection closed by peer: rank {rank}: {error.strerror}") from None

    def abort(self) -> None:
        """Give up what waits for other ranks, now and later. Called from another thread."""
        self.aborted.set()
        for ranks, group in tuple(self._groups.items()):
            if self.rank in ranks and len(ranks) > 1:
                _disconnect(group)

    def explain(self, error: BaseException) -> BaseException:
        """`Aborted`, if the error only says that an engine heard of `abort`, or lost a connection by it."""
        heard = isinstance(error, Stopped) or CLOSED in str(error)
        return Aborted() if self.aborted.is_set() and heard else error

    def close(self) -> None:
        self._groups.clear()
        _leave()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        if self.aborted.is_set():
            raise Aborted
        try:
            yield
        except RuntimeError:
            if self.aborted.is_set():
                raise Aborted from None
            raise


def _leave() -> None:
    """Leave torch's world, also a half-made one. torch names groups by a count, which must be the same on all
    ranks of the next world; it forgets the count only of a world that was made."""
    if dist.is_initialized():
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0


def _disconnect(group: dist.ProcessGroup) -> None:
    """End all that waits in `group`. NCCL can be told so; gloo's `abort` does nothing, but when the wait for
    one message times out, it closes the group's connections, and all other waits end with `CLOSED`."""
    neighbour = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], neighbour, ABORT_TAG).wait(timedelta(milliseconds=1))
    group.abort()
