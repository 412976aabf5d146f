"""Why a score node makes a forward pass that training makes again."""

from __future__ import annotations

from hflow.plan.plan import Plan
from hflow.plan.shared_forward import refusal, sharing
from hflow.units import seconds


def own_forward(plan: Plan, name: str) -> str:
    """Empty for a node that does not score with a model which is trained, or that shares its forward pass."""
    node, graph = plan.graph.node(name), plan.graph
    trainers = graph.trainers(node.model.model) if node.model and node.op == "score" else ()
    if not trainers or plan.node(name).strategy.share_forward:
        return ""
    told = f"{name} shares no forward pass with {trainers[0].name}: "
    reason = refusal(graph, plan.shapes[node.model_use.model], node, trainers[0])
    if reason:
        return told + reason
    if name not in sharing(graph, plan.shapes):
        return f"{told}another node may"
    tried = plan.search.tried_sharing
    if not tried:
        refused = plan.search.planner == "exact"
        return told + ("a pin refuses it" if refused else "--planner exact tries it")
    return told + (tried.reason or f"a step would take {seconds(tried.step_time_s or 0.0)}, but is not run")
