"""The memory of hosts: copies of what waits there while its node does not run, and of servers' weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from hflow.compiler.state import Draft
from hflow.cost.device import BYTES
from hflow.cost.memory import optimizer_bytes, pinned_bytes, weight_bytes
from hflow.plan.engine_registry import profile_of
from hflow.plan.node_plan import NodePlan
from hflow.plan.replicas import Instance, instance_of

MOMENT_BYTES = 4  # of an element of the optimizer's state


def host_memory(draft: Draft, nodes: Iterable[NodePlan]) -> Mapping[int, Counter[str]]:
    """Bytes by label, of every host that keeps something."""
    found: dict[int, Counter[str]] = {}
    for instance, plan in _instances(draft, nodes).items():
        label, size = _kept(draft, instance, plan)
        for device in instance.mesh.devices if size else ():
            found.setdefault(draft.cluster.host(device), Counter())[f"{instance.model} {label}"] += size
    return found


def _instances(draft: Draft, nodes: Iterable[NodePlan]) -> dict[Instance, NodePlan]:
    """Each with the plan that says where it waits: that of its trainer, if it has one."""
    plans = {n.node: n for n in nodes}
    found: dict[Instance, NodePlan] = {}
    for graph in (g for g in (draft.graph, draft.evaluation_graph) if g):
        for node in (n for n in graph.nodes if n.model):
            plan = plans[node.name]
            instance = instance_of(node, plan.sharding)
            if instance not in found or plan.kind == "train":
                found[instance] = plan
    return found


def _kept(draft: Draft, instance: Instance, plan: NodePlan) -> tuple[str, int]:
    """What one of its devices keeps on the host."""
    shape, dtype = draft.shapes[instance.model], draft.graph.model(instance.model).dtype
    mesh, strategy, platform = instance.mesh, plan.strategy, draft.cluster.device.platform
    if plan.offload and plan.kind == "train":
        state = optimizer_bytes(shape, dtype, mesh, strategy)
        return "Adam", pinned_bytes(shape, state, MOMENT_BYTES, mesh.tp)
    weights = weight_bytes(shape, dtype, mesh, False, strategy)
    if plan.offload:
        return "weights", pinned_bytes(shape, weights, BYTES[dtype], mesh.tp)
    renewed = bool(draft.graph.trainers(instance.model)) and not instance.lag
    if profile_of(plan.engine).sleeps(platform, renewed):
        return "weights for its server", weights
    return "", 0
