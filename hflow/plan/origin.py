"""What an exported model, a picture or a page was made from: its graph file, and its plan.

They are carried along, so that who is given a model, or a picture, can run again what made it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hflow.plan.plan import Plan, to_json, without_places

GRAPH_FILE, PLAN_FILE = "hflow_graph.yaml", "hflow_plan.json"  # in the folder of an exported model


@dataclass(frozen=True)
class Origin:
    """The texts of a graph file, and of a plan; without a plan, that is empty."""

    graph: str
    plan: str = ""


def origin_of(plan: Plan) -> Origin:
    """Where the graph file lies is nobody's business who is given what was made of it."""
    return Origin(plan.graph.text, to_json(without_places(plan)) + "\n")


def origin_files(plan: Plan) -> dict[str, str]:
    """By name, what goes beside the weights of a model that was trained under `plan`."""
    origin = origin_of(plan)
    return {GRAPH_FILE: origin.graph, PLAN_FILE: origin.plan}
