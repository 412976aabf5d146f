"""The pins under which a graph is planned as it was: what a plan says of its nodes, in words of `--pin`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.plan.shared_forward import sharing


def pins_of(plan: Plan) -> tuple[str, ...]:
    """One for every node of the step that has a model: sizes, devices, strategy and micro-batch."""
    placed = {node.name for node in plan.graph.nodes if node.model}
    return tuple(_pin(node, plan) for node in plan.nodes if node.node in placed)


def placed_at(node: NodePlan) -> str:
    """The pin of its sizes and devices alone."""
    return f"{node.node}={','.join(_sizes(node))}{_at(node)}"


def _pin(node: NodePlan, plan: Plan) -> str:
    words = [*_sizes(node), f"ep{node.strategy.ep}", f"micro{node.micro_batch}"]
    words += ["etp1"] if node.strategy.whole_experts else []
    pairs = sharing(plan.graph, plan.shapes)
    if node.node in (*pairs, *pairs.values()):
        words.append("share-forward" if node.strategy.share_forward else "no-share-forward")
    words += _of_training(node) if node.kind == "train" else ()
    if node.kind != "generate":
        words.append("sp" if node.strategy.sp else "no-sp")
    if plan.cluster.host_link and (node.offload or node.kind == "train"):
        words.append("offload" if node.offload else "no-offload")
    return f"{node.node}={','.join(words)}{_at(node)}"


def _sizes(node: NodePlan) -> list[str]:
    return [f"{axis}{size}" for axis, size in node.mesh.axes]


def _at(node: NodePlan) -> str:
    return f"@{','.join(_ranges(sorted(node.mesh.devices)))}"


def _of_training(node: NodePlan) -> tuple[str, ...]:
    strategy = node.strategy
    recompute = "recompute" if strategy.recompute == "full" else "no-recompute"
    return f"zero{strategy.zero}", recompute, f"vpp{strategy.vpp}"


def _ranges(devices: Sequence[int]) -> Iterator[str]:
    """``0-3`` and ``6`` of ascending numbers."""
    first = devices[0]
    for device, following in pairwise((*devices, -1)):
        if following != device + 1:
            yield f"{first}-{device}" if device > first else f"{device}"
            first = following
