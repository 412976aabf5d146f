"""Another plan for a run that has lost devices."""

from __future__ import annotations

from hflow.compiler.compile import compile_graph
from hflow.compiler.options import PlannerOptions
from hflow.plan.cluster import Cluster
from hflow.plan.plan import Plan


def replan(plan: Plan, cluster: Cluster) -> Plan:
    """The plan's graph for `cluster`, with the engines that generate now. Pins do not count: they name
    devices that may be gone.

    Raises:
        HflowError: as `compile_graph`.
    """
    generates = [node.name for node in plan.graph.nodes if node.op == "generate"]
    engines = tuple(f"{name}={plan.node(name).engine}" for name in generates)
    return compile_graph(plan.graph, cluster, (), PlannerOptions(engines=engines))
