"""Why a plan leaves devices without work, where the reason is that nothing divides."""

from __future__ import annotations

from hflow.compiler.candidates.meshes import meshes, refusal
from hflow.compiler.candidates.node_groups import NodeGroup, node_groups
from hflow.compiler.engines import engine_choices, engines_of
from hflow.compiler.state import Draft
from hflow.graph.evaluation import evaluation_graph
from hflow.plan.layout import Mesh
from hflow.plan.plan import Plan
from hflow.plan.program import Program


def undivided(plan: Plan) -> str:
    """``rollout on 24: dp3 does not divide 128 rows``: what is in the way of layouts on most devices, if no
    node with a model has one on more devices than it uses, whatever the memory and the pins; else empty."""
    draft = _unpinned(plan)
    groups = node_groups(draft.graph, draft.engines, draft.evaluation_graph, draft.sharing)
    reasons = [_in_the_way(plan, draft, group) for group in groups]
    return reasons[0] if reasons and all(reasons) else ""


def _unpinned(plan: Plan) -> Draft:
    (engines,) = engine_choices(engines_of(plan), plan.graph, plan.cluster)
    step = Program(plan.graph, (), ())
    return Draft(plan.graph, evaluation_graph(plan.graph), plan.cluster, plan.shapes, step, engines=engines)


def _in_the_way(plan: Plan, draft: Draft, group: NodeGroup) -> str:
    """Empty if one of the layouts on more devices divides, or there is none."""
    used = min(len(plan.node(node.name).mesh.devices) for node in group.nodes)
    more = [mesh for mesh in meshes(draft, group) if len(mesh.devices) > used]
    refused: list[tuple[Mesh, str]] = []
    for mesh in more:
        reason = refusal(draft, group, mesh)
        if not reason:
            return ""
        refused.append((mesh, reason))
    if not refused:
        return ""
    mesh, reason = min(refused, key=_telling)
    return f"{group.nodes[0].name} on {len(mesh.devices)}: {reason}"


def _telling(refused: tuple[Mesh, str]) -> tuple[int, bool, int]:
    """Of the layouts on most devices those that split the model as far as it divides, and so leave the fewest
    replicas among which rows are to be divided."""
    mesh, reason = refused
    return -len(mesh.devices), not reason.startswith("dp"), mesh.dp
