"""Predict the peak memory of every device, and refuse a plan that does not fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from hflow.compiler.cost.memory import weight_bytes
from hflow.compiler.draft import Draft
from hflow.compiler.instances import Instance, instances
from hflow.compiler.layout import device_text
from hflow.compiler.plan import DeviceMemory, NodePlan
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.graph import Node


def check_memory(draft: Draft) -> Draft:
    """Raises HF305 for the fullest device that does not hold what the plan puts there."""
    memory = device_memory(draft, draft.nodes)
    worst = max(memory, key=lambda m: m.peak_bytes)
    if worst.peak_bytes > worst.capacity_bytes:
        parts = " + ".join(f"{name} {size / 1e9:.3g}" for name, size in worst.parts.items())
        message = (
            f"device {device_text(worst.devices)} needs {worst.peak_bytes / 1e9:.3g} GB"
            f" and has {worst.capacity_bytes / 1e9:.3g} GB"
        )
        raise HflowError(
            Diagnostic("HF305", message, help=f"{parts} GB; use more devices or smaller batches")
        )
    return replace(draft, memory=memory)


def device_memory(draft: Draft, nodes: Iterable[NodePlan]) -> tuple[DeviceMemory, ...]:
    """Weights that stay, plus the largest working set: colocated nodes run one at a time.

    Devices with equal contents are listed together.
    """
    static: dict[int, dict[str, int]] = defaultdict(dict)
    working: dict[int, tuple[int, str]] = defaultdict(lambda: (0, ""))
    plans = {n.node: n for n in nodes}
    graphs = [g for g in (draft.graph, draft.evaluation_graph) if g]
    for instance, trainer in instances(graphs, {name: p.sharding for name, p in plans.items()}).items():
        shape, dtype = draft.shapes[instance.model], draft.graph.model(instance.model).dtype
        size = weight_bytes(shape, dtype, instance.mesh, trainer is not None)
        for device in instance.mesh.devices:
            static[device][_label(instance, trainer)] = size
    for plan in (p for p in plans.values() if p.model):
        for device in plan.mesh.devices:
            working[device] = max(working[device], (plan.memory_bytes, plan.node))
    groups: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for device, parts in static.items():
        held = {**parts, f"{working[device][1]} working set": working[device][0]}
        groups[tuple(held.items())].append(device)
    capacity = draft.cluster.device.memory_bytes
    return tuple(
        DeviceMemory(tuple(sorted(devices)), sum(s for _, s in parts), capacity, dict(parts))
        for parts, devices in sorted(groups.items(), key=lambda item: min(item[1]))
    )


def _label(instance: Instance, trainer: Node | None) -> str:
    state = "weights, gradients, Adam" if trainer else "older weights" if instance.lag else "weights"
    return f"{instance.model} {state} ({instance.mesh})"
