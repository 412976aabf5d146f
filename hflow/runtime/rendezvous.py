"""The store of torch.distributed at which processes of several hosts meet."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

BACKLOG = 1024  # connections that wait to be accepted: all ranks come at once
LIMIT = timedelta(minutes=5)  # torch's own


def open_store(address: str) -> tuple[int, TCPStore]:
    """Its port, and the store, which this process keeps. It listens at `address` alone. The socket is bound
    before the store exists, so no port can be snatched."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(BACKLOG)
    port = listener.getsockname()[1]
    listening = listener.detach()
    return port, TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listening)


def join_store(address: str, port: int, limit: timedelta = LIMIT) -> TCPStore:
    """The store that another process keeps. Raises RuntimeError where it is not reached within `limit`."""
    return TCPStore(address, port, None, False, limit)
