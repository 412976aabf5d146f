"""Rows of devices, moved together as if there were no hosts between them that none of them uses.

Hosts are alike, so that what moves between the rows takes as long there: it is found out once for many
places.
"""

from __future__ import annotations

from collections.abc import Sequence

from hflow.plan.cluster import Cluster


def unused_before(cluster: Cluster, rows: Sequence[Sequence[int]]) -> list[int]:
    """Of each row, how many devices come before it on hosts that no row uses; 0 where hosts differ.

    Args:
        rows: devices in ascending order, one at least in each.
    """
    found = [0] * len(rows)
    if cluster.more:
        return found
    per_host = cluster.devices_per_host
    hosts = sorted((row[0] // per_host, row[-1] // per_host, number) for number, row in enumerate(rows))
    unused = end = 0
    for first, last, number in hosts:
        unused += max(0, first - end)
        end = max(end, last + 1)
        found[number] = unused * per_host
    return found
