"""What a worker and its process of functions say to each other: fields as JSON, and tensors as they lie in
memory, over a socket that nobody else has."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hflow.runtime.rows import Rows

Form = tuple[str, bool]  # of rows among the tensors: port, and whether the second of two tensors has lengths

_HEAD = struct.Struct("<8sQ")
_MARK = b"hflow fn"
_DTYPES = {
    str(dtype): dtype
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8)
}


class BadMessageError(Exception):
    """Something else than hflow has written to the socket."""


@dataclass(frozen=True)
class FunctionMessage:
    fields: Mapping[str, Any]
    tensors: Sequence[Tensor] = ()


class FunctionChannel:
    """One end of the socket. `wait`, for one that does not block, is called until it is ready, and told
    whether to write."""

    def __init__(self, connection: socket.socket, wait: Callable[[bool], None] | None = None) -> None:
        self._socket = connection
        self._wait = wait

    def send(self, message: FunctionMessage) -> None:
        """Raises OSError when the other end is closed."""
        tensors = [tensor.contiguous() for tensor in message.tensors]
        forms = [(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]
        head = json.dumps({**message.fields, "tensors": forms}).encode()
        for part in (_HEAD.pack(_MARK, len(head)), head, *map(_bytes_of, tensors)):
            self._write(memoryview(part))

    def receive(self) -> FunctionMessage:
        """The next message; tensors have memory of their own.

        Raises:
            EOFError, OSError: the other end is closed.
            BadMessageError: it is no message.
        """
        mark, size = _HEAD.unpack(self._read(_HEAD.size))
        if mark != _MARK:
            raise BadMessageError
        try:
            fields = json.loads(self._read(size))
            tensors = [self._tensor(*form) for form in fields.pop("tensors")]
        except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
            raise BadMessageError from error
        return FunctionMessage(fields, tensors)

    def close(self) -> None:
        self._socket.close()

    def _tensor(self, dtype: str, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=_DTYPES[dtype])
        self._fill(_bytes_of(tensor))
        return tensor

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while view:
            try:
                count = self._socket.recv_into(view)
            except BlockingIOError:
                self._until_ready(writing=False)
                continue
            if not count:
                raise EOFError
            view = view[count:]

    def _write(self, view: memoryview) -> None:
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._until_ready(writing=True)

    def _until_ready(self, writing: bool) -> None:
        assert self._wait, "the socket blocks"
        self._wait(writing)


def of_rows(rows: Mapping[str, Rows]) -> tuple[list[Form], list[Tensor]]:
    """Rows as tensors; without the versions of texts, which no function sees."""
    forms = [(port, each.lengths is not None) for port, each in rows.items()]
    tensors = [t for each in rows.values() for t in (each.values, each.lengths) if t is not None]
    return forms, tensors


def to_rows(forms: Sequence[Form], tensors: Sequence[Tensor]) -> dict[str, Rows]:
    rest = iter(tensors)
    return {port: Rows(next(rest), next(rest) if ragged else None) for port, ragged in forms}


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
