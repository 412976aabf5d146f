"""Copying straight out of the memory of another process of the same host (Linux's cross-memory attach).

What goes through a socket is copied into the kernel and out of it, by two processes that share the host's
cores; here the reader copies once, from storage to storage. Only for host memory: devices have NCCL. Where
the system does not allow it (another host, user or container, or no Linux), messages go over sockets.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

ENTRIES = 1024  # of a call: Linux's IOV_MAX
CALL_BYTES = 2**30  # Linux copies up to 2 GiB
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)

RowsInMemory = tuple[int, int]  # address of the first row, bytes from one row to the next


@dataclass(frozen=True)
class Neighbours:
    """`pids` by rank; `pairs` of a rank and another whose memory it can read. All ranks know the same."""

    pids: tuple[int, ...] = ()
    pairs: frozenset[tuple[int, int]] = frozenset()


def meet(rank: int, size: int) -> Neighbours:
    """Find out by trying: every rank looks for a random number at the address that another one tells.
    Collective over the world, whose backend is gloo."""
    if hasattr(_libc, "prctl"):  # Yama, where it is on (Ubuntu), lets nobody but a parent in unless told so
        _libc.prctl(PR_SET_PTRACER, ANY, 0, 0, 0)
    token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64)
    told = _gathered(torch.tensor([os.getpid(), token.data_ptr(), *token.tolist()]), size).tolist()
    found = [other != rank and _finds(*one) for other, one in enumerate(told)]
    readable = _gathered(torch.tensor(found, dtype=torch.int64), size)  # all have looked, once this is there
    return Neighbours(
        tuple(pid for pid, *_ in told), frozenset((a, b) for a, b in readable.nonzero().tolist())
    )


def place(view: Tensor) -> RowsInMemory:
    """Of a view of one or two dimensions, for `read` in another process."""
    assert view.dim() <= 2 and (view.stride(-1) == 1 or view.shape[-1] == 1), (view.shape, view.stride())
    return view.data_ptr(), _pitch(view)


def read(pid: int, places: Sequence[RowsInMemory], views: Sequence[Tensor]) -> int:
    """Fill every view with what lies at its place in another process, in the same shape and dtype.

    Returns:
        Bytes that the system says it has copied.

    Raises:
        OSError: the process is gone, or may not be read.
    """
    here = np.concatenate([_entries(place(view), view) for view in views])
    there = np.concatenate([_entries(*one) for one in zip(places, views, strict=True)])
    return sum(_readv(pid, *call) for call in _calls(here, there))


Entries = NDArray[np.uint64]  # one (address, bytes) per row: C's `struct iovec`


def _readv(pid: int, here: Entries, there: Entries) -> int:
    call: Any = _libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    sides = [(ctypes.c_void_p(side.ctypes.data), ctypes.c_ulong(len(side))) for side in (here, there)]
    copied = call(ctypes.c_int(pid), *sides[0], *sides[1], ctypes.c_ulong(0))
    if copied != int(here[:, 1].sum()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code) if copied < 0 else "only a part could be read")
    return copied


def _entries(place_: RowsInMemory, view: Tensor) -> Entries:
    """Of what is as large as `view` and lies at a place: its rows, or, where they lie together, all as one.
    The system finds the pages of an entry at once, so that few large ones are read faster."""
    address, pitch = place_
    rows = view.shape[0] if view.dim() > 1 else 1
    length = view.numel() // rows * view.element_size()
    if rows == 1 or pitch == length:
        return np.array([[address, rows * length]], dtype=np.uint64)
    addresses = np.uint64(address) + np.arange(rows, dtype=np.uint64) * np.uint64(pitch)
    return np.stack([addresses, np.full_like(addresses, length)], axis=1)


def _calls(here: Entries, there: Entries) -> Iterator[tuple[Entries, Entries]]:
    """Both sides cut into what one call takes: as many bytes of each, which may lie differently in them."""
    while len(here):
        size = min(CALL_BYTES, *(int(side[:ENTRIES, 1].sum()) for side in (here, there)))
        (first, here), (second, there) = (_cut(side, size) for side in (here, there))
        yield first, second


def _cut(entries: Entries, size: int) -> tuple[Entries, Entries]:
    """The first `size` bytes, and the others; what lies across is cut in two."""
    ends = np.cumsum(entries[:ENTRIES, 1])
    last = int(np.searchsorted(ends, size))
    over = ends[last] - np.uint64(size)
    first, rest = entries[: last + 1].copy(), entries[last + (over == 0) :]
    first[last, 1] -= over
    if over:
        rest[0] = first[last].sum(), over
    return first, rest


def _pitch(view: Tensor) -> int:
    return (view.stride(0) if view.dim() > 1 else view.numel()) * view.element_size()


def _finds(pid: int, address: int, *token: int) -> bool:
    """The number that a process says is in its memory; another host's process is another one, or none."""
    found = torch.zeros(len(token), dtype=torch.int64)
    try:
        read(pid, [(address, found.nbytes)], [found])
    except (OSError, AttributeError):  # AttributeError: a C library without the call
        return False
    return found.tolist() == list(token)


def _gathered(row: Tensor, size: int) -> Tensor:
    rows = row.new_empty(size, len(row))
    dist.all_gather(list(rows), row)
    return rows
