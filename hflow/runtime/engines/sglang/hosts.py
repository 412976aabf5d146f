"""A server's hosts. Each has a program with equally many of its ranks, which a worker there starts; all meet
as `meeting` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerHosts:
    """`count` hosts of a server, seen from the one with `number`. `store`: where all meet, as address:port;
    empty where there is one."""

    count: int = 1
    number: int = 0
    store: str = ""

    @staticmethod
    def of(ranks: Sequence[str], rank: int) -> ServerHosts:
        """From what tells the host of each rank.

        Raises:
            ValueError: they have not equally many ranks each, one host after the other.
        """
        order = list(dict.fromkeys(ranks))
        each = len(ranks) // len(order)
        if list(ranks) != [host for host in order for _ in range(each)]:
            told = ", ".join(
                f"rank {number} on host {order.index(host)}" for number, host in enumerate(ranks)
            )
            raise ValueError(f"its hosts must have equally many ranks each, one host after the other: {told}")
        return ServerHosts(len(order), order.index(ranks[rank]))


ONE_HOST = ServerHosts()
