"""Which nodes use each copy of a model's weights, and what it therefore keeps in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hflow.cost.residency import Residency, Use, evaluated_residency, residency
from hflow.cost.working_memory import kept_forward_bytes
from hflow.graph.ir import Graph, step_node
from hflow.plan.cluster import Cluster
from hflow.plan.frozen import trained_with, untrained_layers
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import NodePlan
from hflow.plan.replicas import Instance, instance_of, shared_server
from hflow.plan.workload import workload

Moment = tuple[int, str]  # a node runs: of the step (0) or of one of its evaluations (1, …), its name


def instance_users(
    graphs: Sequence[Graph], plans: Iterable[NodePlan]
) -> dict[Instance, dict[Moment, NodePlan]]:
    """The plans of the nodes that use each instance.

    Args:
        graphs: of the step and, if there is one, of the evaluation.
    """
    plan_of = {plan.node: plan for plan in plans}
    users: dict[Instance, dict[Moment, NodePlan]] = {}
    for number, graph in enumerate(graphs):
        for node in (n for n in graph.nodes if n.model):
            plan = plan_of[node.name]
            users.setdefault(instance_of(node, plan.sharding), {})[number, node.name] = plan
    return users


def instance_residency(
    graph: Graph,
    shapes: Mapping[str, ModelShape],
    cluster: Cluster,
    instance: Instance,
    users: Mapping[Instance, Mapping[Moment, NodePlan]],
) -> Residency:
    """What it keeps, used as `users` say. `graph`: of the step."""
    model, plans = graph.model(instance.model), users[instance].values()
    if shared_server(instance, [own for own, at in users.items() if _in_step(at)]):
        strategy = next(iter(plans)).strategy
        return evaluated_residency(model, shapes[instance.model], instance.mesh, strategy, cluster)
    trainings = [plan for plan in plans if plan.kind == "train"]
    use: Use = "train" if trainings else "read" if graph.trainers(instance.model) else "frozen"
    deciding = trainings or [*plans]
    generating = (plan for plan in plans if plan.kind == "generate")
    kept = residency(
        model, shapes[instance.model], instance.mesh,
        deciding[0].strategy, cluster, use, instance.lag,
        offload=all(plan.offload for plan in deciding),
        trained=trained_with(graph, instance.model),
        tokens=max((_tokens(graph, plan) for plan in generating), default=0),
        activations=sum(kept_activations(graph, shapes, plan) for plan in trainings),
    )  # fmt: skip
    return replace(kept, always=kept.in_use) if kept.copy_stays else kept


def kept_activations(graph: Graph, shapes: Mapping[str, ModelShape], training: NodePlan) -> int:
    """Bytes on a device of what a forward pass keeps that a train node shares."""
    if not training.strategy.share_forward:
        return 0
    node = graph.node(training.node)
    model, shape = graph.model_of(node), shapes[node.model_use.model]
    untrained = untrained_layers(shape, trained_with(graph, model.name).freeze)
    how = training.mesh, training.strategy, untrained
    return kept_forward_bytes(shape, model.weight_dtype, workload(node), *how)


def _in_step(moments: Iterable[Moment]) -> bool:
    return any(number == 0 for number, _ in moments)


def _tokens(graph: Graph, plan: NodePlan) -> int:
    """At once; of an evaluation's node no more than of the node of the step that it stands for."""
    return plan.cached(workload(graph.node(step_node(plan.node))).sequence)
