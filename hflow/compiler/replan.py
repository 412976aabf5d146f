"""Other plans for a run: for the devices that are left of its cluster, or for the lengths that it sees."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.compiler.compile import compile_graph
from hflow.compiler.engines import engines_of
from hflow.compiler.options import PlannerOptions
from hflow.compiler.plan_pins import pins_of
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.graph.lengths_file import SeenLengths
from hflow.graph.lengths_of_run import with_lengths
from hflow.plan.cluster import Cluster
from hflow.plan.plan import Plan


def replan(plan: Plan, cluster: Cluster) -> Plan:
    """The plan's graph for `cluster`, with the engines that generate now. Pins do not count: they name
    devices that may be gone.

    Raises:
        HflowError: as `compile_graph`.
    """
    return compile_graph(plan.graph, cluster, (), PlannerOptions(engines=engines_of(plan)))


def replan_for_lengths(plan: Plan, seen: Mapping[str, SeenLengths]) -> tuple[Plan | None, Plan]:
    """The plan's graph with the lengths that a run of it saw: planned as it was, and planned anew, with the
    engines that generate now.

    Returns:
        The old plan as `repriced` does, and the new one.

    Raises:
        HflowError: as `compile_graph`.
    """
    graph = with_lengths(plan.graph, seen)
    options = PlannerOptions(engines=engines_of(plan))
    return repriced(plan, graph, plan.cluster), compile_graph(graph, plan.cluster, (), options)


def repriced(plan: Plan, graph: Graph, cluster: Cluster) -> Plan | None:
    """`graph` on `cluster`, planned as `plan` is; None where it has no such plan."""
    try:
        return compile_graph(graph, cluster, pins_of(plan), PlannerOptions(engines=engines_of(plan)))
    except HflowError:
        return None
