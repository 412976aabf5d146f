"""Predict the peak memory of every device, and refuse a plan that does not fit."""

from __future__ import annotations

from dataclasses import replace

from hflow.compiler.host_room import HostTooFull
from hflow.compiler.memory import device_memory
from hflow.compiler.state import Draft
from hflow.cost.host_memory import host_memory
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import DeviceMemory
from hflow.units import device_text


def check_memory(draft: Draft) -> Draft:
    """Raises HF305 for the devices that lack most of what the plan puts there, HostTooFull for the fullest
    host."""
    memory = device_memory(draft, draft.nodes, draft.programs)
    worst = max(memory, key=lambda m: m.peak_bytes - m.capacity_bytes)
    if worst.peak_bytes > worst.capacity_bytes:
        raise HflowError(_too_full(worst))
    _check_hosts(draft)
    return replace(draft, memory=memory)


def _check_hosts(draft: Draft) -> None:
    """Where the cluster says what memory its hosts have."""
    limit = draft.cluster.host_memory_bytes
    hosts = host_memory(draft.graphs, draft.shapes, draft.cluster, _all_nodes(draft))
    worst = max(hosts, key=lambda host: hosts[host].total(), default=None)
    if limit is None or worst is None or hosts[worst].total() <= limit:
        return
    parts = " + ".join(f"{name} {size / 1e9:.3g}" for name, size in hosts[worst].items())
    waits = tuple(n.node for n in draft.nodes if n.offload)
    message = (
        f"host {worst} keeps {hosts[worst].total() / 1e9:.3g} GB for its devices,"
        f" and has {limit / 1e9:.3g} GB (`host_memory_gb`)"
    )
    help_ = f"{parts} GB; a snapshot is what a checkpoint is written from"
    raise HostTooFull(Diagnostic("HF305", message, help=help_), waits)


def _all_nodes(draft: Draft) -> list[NodePlan]:
    return [*draft.nodes, *(node for named in draft.evaluations for node in named.nodes)]


def _too_full(memory: DeviceMemory) -> Diagnostic:
    parts = " + ".join(f"{name} {size / 1e9:.3g}" for name, size in memory.parts.items())
    message = (
        f"device {device_text(memory.devices)} needs {memory.peak_bytes / 1e9:.3g} GB while"
        f" `{memory.node}` runs, and has {memory.capacity_bytes / 1e9:.3g} GB"
    )
    return Diagnostic("HF305", message, help=f"{parts} GB; use more devices or smaller batches")
