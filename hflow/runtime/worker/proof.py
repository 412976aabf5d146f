"""How the ranks of a gloo group make sure of each other, by a secret that only they know.

gloo does not ask who connects. Everyone who reaches the port of the rendezvous store can write another
address into it, and a rank takes the first connection that sends the small number it waits for. Either way a
stranger would be taken for a rank. So ranks sign the addresses that they leave in the store, and the first
message over each new connection, in both directions, is a code that takes the secret to make. None of this
helps against somebody who reads or changes the packets of the network.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from hflow.diagnostics import Diagnostic, HflowError

HASH, CODE_BYTES = "sha256", 32
ANSWER = timedelta(minutes=1)  # connections exist only once all ranks have begun to make the group
SILENT = "timed out"  # what gloo says after it
TAG = 0


@dataclass(frozen=True)
class GroupKey:
    """Makes the codes of one group. Every world has another secret, and every group of a world another name,
    so that no code is of use in another group or world."""

    secret: bytes
    group: str

    def code(self, purpose: str, subject: str, value: bytes = b"") -> bytes:
        """Only `value` may hold zero bytes."""
        begin = f"{self.group}\0{purpose}\0{subject}\0".encode()
        return hmac.digest(self.secret, begin + value, HASH)

    def of_connection(self, sender: int, receiver: int) -> bytes:
        """Another one for each direction, so that none can be sent back to where it came from."""
        return self.code("connection", f"{sender} {receiver}")


class SignedStore(Store):
    """What gloo asks of a store; values that a rank of the group has not written under this key are refused.

    torch does not keep this object alive: hold it as long as gloo may ask.
    """

    def __init__(self, store: Store, key: GroupKey):
        super().__init__()
        self._store, self._key = store, key

    def set(self, key: str, value: Any) -> None:
        signed: Any = self._key.code("value", key, value) + value  # torch takes bytes, too
        self._store.set(key, signed)

    def get(self, key: str) -> bytes:
        """HF404: somebody else has written it."""
        signed = self._store.get(key)
        code, value = signed[:CODE_BYTES], signed[CODE_BYTES:]
        if not hmac.compare_digest(code, self._key.code("value", key, value)):
            raise _stranger(f"somebody who is not of this run has written `{key}` into the rendezvous store")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout) if timeout else self._store.wait(keys)


def check_peers(group: Any, key: GroupKey) -> None:
    """Exchange codes with all other ranks of a new group. Collective over the group.

    Raises:
        HflowError: HF404: what is connected as a rank is not that rank; HF402: it is silent.
    """
    own, size = group.rank(), group.size()
    others = [rank for rank in range(size) if rank != own]
    heard = {rank: torch.empty(CODE_BYTES, dtype=torch.uint8) for rank in others}
    coming = {rank: group.recv([heard[rank]], rank, TAG) for rank in others}
    going = [group.send([_tensor(key.of_connection(own, rank))], rank, TAG) for rank in others]
    for rank in others:
        _wait(coming[rank], f"rank {rank} of {size}")
        if not hmac.compare_digest(heard[rank].numpy().tobytes(), key.of_connection(rank, own)):
            raise _stranger(f"somebody who is not of this run has connected as rank {rank} of {size}")
    for work in going:
        work.wait()


def _tensor(code: bytes) -> Tensor:
    return torch.frombuffer(bytearray(code), dtype=torch.uint8)


def _wait(work: Any, peer: str) -> None:
    try:
        work.wait(ANSWER)
    except RuntimeError as error:
        if SILENT not in str(error).lower():
            raise
        message = f"{peer} has connected, but says nothing for {ANSWER.total_seconds():g} s"
        raise HflowError(Diagnostic("HF402", message)) from None


def _stranger(message: str) -> HflowError:
    help = "let only machines that you trust reach the ports of this run: docs/running.md, Security"
    return HflowError(Diagnostic("HF404", message, help=help))
