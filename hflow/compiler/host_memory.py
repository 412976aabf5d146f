"""The memory of hosts: copies of what waits there while its node does not run, and of servers' weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from hflow.compiler.memory import instance_residency, instance_users
from hflow.compiler.state import Draft
from hflow.plan.node_plan import NodePlan


def host_memory(draft: Draft, nodes: Iterable[NodePlan]) -> Mapping[int, Counter[str]]:
    """Bytes by label, of every host that keeps something."""
    found: dict[int, Counter[str]] = {}
    for instance, users in instance_users(draft, nodes).items():
        label, size = instance_residency(draft, instance, users.values()).on_host
        for device in instance.mesh.devices if size else ():
            found.setdefault(draft.cluster.host(device), Counter())[f"{instance.model} {label}"] += size
    return found
