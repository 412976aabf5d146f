"""A complete choice: an assignment for every node group, and within memory the fastest configuration for each
of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hflow.compiler.candidates.node_groups import ExecConfig
from hflow.compiler.planner.assignments import Assignments
from hflow.compiler.planner.search_space import SearchSpace


@dataclass(frozen=True)
class FullAssignment:
    """`configs`: of every node with a model; `step_s`: what the step takes."""

    assignments: Assignments
    configs: Mapping[str, ExecConfig]
    step_s: float


def fastest_configs(space: SearchSpace, assignments: Assignments) -> dict[str, ExecConfig] | None:
    """The fastest configuration of each node in what memory the others leave it; None where one has none."""
    copies = space.weight_syncs.own_copies(space.groups, assignments)
    free: dict[int, int] = {}
    for group in space.groups:
        staying = assignments[group.name].candidate.idle_bytes + copies[group.name].staying
        for resource in assignments[group.name].resources:
            free[resource] = free.get(resource, space.capacity) - staying
    configs: dict[str, ExecConfig] = {}
    for group in space.groups:
        assignment = assignments[group.name]
        limit = copies[group.name].limit(min(free[r] for r in assignment.resources))
        for node, choices in zip(group.nodes, assignment.candidate.fronts):
            config = choices.fastest(limit)
            if config is None:
                return None
            configs[node.name] = config
    return configs
