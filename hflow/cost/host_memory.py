"""The memory of hosts: copies of what waits there while its node does not run, of servers' weights, and of
what a checkpoint is made of.

Of devices that are CPUs the snapshot of a checkpoint is in their own memory, and not counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hflow.cost.instances import instance_residency, instance_users
from hflow.cost.residency import LabelledBytes
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import NodePlan


def host_memory(
    graphs: Sequence[Graph],
    shapes: Mapping[str, ModelShape],
    cluster: Cluster,
    nodes: Iterable[NodePlan],
) -> Mapping[int, Counter[str]]:
    """Bytes by label, of every host that keeps something.

    Args:
        graphs: of the step and, if there is one, of the evaluation.
    """
    found: dict[int, Counter[str]] = {}
    users = instance_users(graphs, nodes)
    for instance in users:
        kept = instance_residency(graphs[0], shapes, cluster, instance, users)
        snapshot = LabelledBytes("snapshot", 0 if cluster.device.platform == "cpu" else kept.snapshot_bytes)
        for label, size in (part for part in (kept.on_host, snapshot) if part.size):
            for device in instance.mesh.devices:
                found.setdefault(cluster.host(device), Counter())[f"{instance.model} {label}"] += size
    return found


def alike_hosts(hosts: Mapping[int, Counter[str]]) -> list[tuple[tuple[int, ...], Counter[str]]]:
    """Those that keep the same together, in the order of their numbers."""
    kept = {tuple(sorted(parts.items())): parts for parts in hosts.values()}
    return [(tuple(host for host in sorted(hosts) if hosts[host] == parts), parts) for parts in kept.values()]
