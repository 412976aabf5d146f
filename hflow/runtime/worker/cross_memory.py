"""Copying straight out of the memory of another process of the same host (Linux's cross-memory attach).

What goes through a socket is copied into the kernel and out of it, by two processes that share the host's
cores; here the reader copies once, from storage to storage. Only for host memory: devices have NCCL. Where
the system does not allow it (another host, user or container, or no Linux), messages go over sockets.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

ENTRIES = 1024  # of a call: Linux's IOV_MAX
PIECE_BYTES = 2**20  # of an entry; a call then copies no more than a GiB
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)

Place = tuple[int, int]  # address of the first row, bytes from one row to the next


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


def place(view: Tensor) -> Place:
    """Of a view of one or two dimensions, for `read` in another process."""
    assert view.dim() <= 2 and (view.stride(-1) == 1 or view.shape[-1] == 1), (view.shape, view.stride())
    return view.data_ptr(), _pitch(view)


def read(pid: int, places: Sequence[Place], views: Sequence[Tensor]) -> int:
    """Fill every view with what lies at its place in another process, in the same shape and dtype.

    Returns:
        Bytes that the system says it has copied.

    Raises:
        OSError: the process is gone, or may not be read.
    """
    pairs = [_entries(*one) for one in zip(places, views, strict=True)]
    here, there = (np.concatenate(entries) for entries in zip(*pairs))
    copied = 0
    for first in range(0, len(here), ENTRIES):
        copied += _readv(pid, here[first : first + ENTRIES], there[first : first + ENTRIES])
    return copied


Entries = NDArray[np.uint64]  # one (address, bytes) per row: C's `struct iovec`


def _readv(pid: int, here: Entries, there: Entries) -> int:
    here, there = map(np.ascontiguousarray, (here, there))
    mine, theirs = (ctypes.c_void_p(entries.ctypes.data) for entries in (here, there))
    call: Any = _libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    count, flags = ctypes.c_ulong(len(here)), ctypes.c_ulong(0)
    copied = call(ctypes.c_int(pid), mine, count, theirs, count, flags)
    if copied != int(here[:, 1].sum()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code) if copied < 0 else "only a part could be read")
    return copied


def _entries(there: Place, view: Tensor) -> tuple[Entries, Entries]:
    """Of both processes, cut alike: rows, or, where they lie together in both, all of them at once."""
    address, pitch = there
    rows = view.shape[0] if view.dim() > 1 else 1
    length = view.numel() // rows * view.element_size()
    if pitch == _pitch(view) == length:
        rows, length = 1, rows * length
    starts = np.arange(0, length, PIECE_BYTES, dtype=np.uint64)
    lengths = np.minimum(np.uint64(PIECE_BYTES), np.uint64(length) - starts)

    def entries(first: int, step: int) -> Entries:
        of_rows = np.uint64(first) + np.arange(rows, dtype=np.uint64) * np.uint64(step)
        addresses = (of_rows[:, None] + starts).reshape(-1)
        return np.stack([addresses, np.tile(lengths, rows)], axis=1)

    return entries(view.data_ptr(), _pitch(view)), entries(address, pitch)


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
    rows = row.new_empty(size * len(row))
    dist.all_gather_single(rows, row)
    return rows.view(size, len(row))
