"""A complete choice: an assignment for every node group, and within memory the fastest configuration for each
of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hflow.compiler.candidates.node_groups import ExecConfig, NodeGroup
from hflow.compiler.planner.assignments import Assignments, shardings
from hflow.cost.residency import SHARED, OwnCopy


@dataclass(frozen=True)
class FullAssignment:
    """`configs`: of every node with a model; `step_s`: what the step takes."""

    assignments: Assignments
    configs: Mapping[str, ExecConfig]
    step_s: float


def fastest_configs(
    groups: tuple[NodeGroup, ...], assignments: Assignments, capacity: int
) -> dict[str, ExecConfig] | None:
    """The fastest configuration of each node in what memory the others leave it; None where one has none."""
    copies = own_copies(groups, assignments)
    free: dict[int, int] = {}
    for group in groups:
        staying = assignments[group.name].candidate.idle_bytes + copies[group.name].staying
        for resource in assignments[group.name].resources:
            free[resource] = free.get(resource, capacity) - staying
    configs: dict[str, ExecConfig] = {}
    for group in groups:
        assignment = assignments[group.name]
        limit = min(free[r] for r in assignment.resources) - copies[group.name].passing
        for node, choices in zip(group.nodes, assignment.candidate.fronts):
            config = choices.fastest(limit)
            if config is None:
                return None
            configs[node.name] = config
    return configs


def own_copies(groups: tuple[NodeGroup, ...], assignments: Assignments) -> dict[str, OwnCopy]:
    """By node group; a copy that several share counts for the first."""
    lie = shardings(groups, assignments)
    trained = {u.model: lie[u.name] for u in groups if u.role == "train"}
    readers = [u for u in groups if u.use == "read" and lie[u.name] != trained[u.model]]
    copy_of = {u.name: (u.model, u.lag, lie[u.name]) for u in readers}
    nodes = Counter(copy_of[u.name] for u in readers for _ in u.nodes)
    firsts = {copy_of[u.name]: u.name for u in reversed(readers)}
    own = {name: assignments[name].candidate.kept.own_copy(nodes[copy]) for copy, name in firsts.items()}
    return {u.name: own.get(u.name, SHARED) for u in groups}
