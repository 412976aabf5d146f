"""Clusters of what is left of one when devices were lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hflow.plan.cluster import Cluster
from hflow.plan.plan import Plan


def workers_by_host(plan: Plan, is_whole: bool = False) -> tuple[int, ...]:
    """How many workers each host of a plan has, in order of ranks: devices are numbered by host. `is_whole`:
    one on each device of the cluster, also those on which the plan runs nothing."""
    if is_whole:
        return (plan.cluster.devices_per_host,) * plan.cluster.hosts
    return tuple(Counter(map(plan.cluster.host, range(max(plan.devices) + 1))).values())


def smaller_clusters(cluster: Cluster, rooms: Sequence[int], below: int) -> Iterator[Cluster]:
    """Clusters of the same kind, of those of its devices that are left: most devices first, among equals
    fewer hosts first.

    Args:
        cluster: of one kind of host, as all that can be planned.
        rooms: how many workers each node holds.
        below: fewer devices than that.
    """
    shapes: list[tuple[int, int]] = []
    for devices in range(1, cluster.devices_per_host + 1):
        hosts = min(cluster.hosts, sum(room >= devices for room in rooms))
        shapes += [(number, devices) for number in range(1, hosts + 1)]
    shapes.sort(key=lambda shape: (-shape[0] * shape[1], shape[0]))
    for hosts, devices in shapes:
        if hosts * devices < below:
            name = f"{hosts} x {devices} of {cluster.name}"
            yield replace(cluster, name=name, hosts=hosts, devices_per_host=devices)
