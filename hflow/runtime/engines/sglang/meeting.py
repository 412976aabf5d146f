"""Where the hosts of a server meet: a store of torch.distributed, which the worker on the first one keeps.

By it ranks find each other, and workers hear of each other: that all programs have started, or that one has
ended, since ranks that wait for a dead one need not notice.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.runtime.rendezvous import join_store, open_store

JOIN = timedelta(minutes=1)  # for the first host, which listens before others are told where
STARTED, FAILED = "hflow/started", "hflow/failed"  # keys of the store, which torch prefixes with other words


class Meeting:
    """What the workers of a server's hosts tell each other. Any thread may ask it."""

    def __init__(self, store: TCPStore, place: str):
        self._store, self.place = store, place

    @classmethod
    def open(cls, address: str) -> Meeting:
        """For the first host, whose `address` the others reach. Raises OSError: it cannot listen there."""
        port, store = open_store(address)
        return cls(store, f"[{address}]:{port}" if ":" in address else f"{address}:{port}")

    @classmethod
    def join(cls, place: str) -> Meeting:
        """Raises RuntimeError: nobody is there."""
        address, _, port = place.rpartition(":")
        return cls(join_store(address.strip("[]"), int(port), JOIN), place)

    def tell_started(self) -> None:
        self._store.set(STARTED, "1")

    @property
    def has_started(self) -> bool:
        """Whether the first host has said so: its ranks wait for all others."""
        with suppress(RuntimeError):  # `failure` tells
            return self._store.check([STARTED])
        return False

    def fail(self, why: str) -> None:
        """Tell the others, unless somebody has told them of a failure before."""
        with suppress(RuntimeError):  # they cannot be reached, and know it
            if not self.failure():
                self._store.set(FAILED, why)

    def failure(self) -> str:
        """Why the server is of no more use; empty while it is."""
        try:
            return self._store.get(FAILED).decode() if self._store.check([FAILED]) else ""
        except RuntimeError:
            return "the worker on its first host cannot be reached"
