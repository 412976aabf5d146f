"""A complete choice: an assignment for every node group, and within memory the fastest configuration for each
of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hflow.compiler.candidates.node_groups import ExecConfig, NodeGroup
from hflow.compiler.planner.assignments import Assignments, shardings


@dataclass(frozen=True)
class FullAssignment:
    """`configs`: of every node with a model; `step_s`: what the step takes."""

    assignments: Assignments
    configs: Mapping[str, ExecConfig]
    step_s: float


def fastest_configs(
    groups: tuple[NodeGroup, ...], assignments: Assignments, capacity: int
) -> dict[str, ExecConfig] | None:
    """The fastest configuration of each node in what memory the others leave it; None where one has none.

    A reader's own copy of the weights is there only while it runs, if it is the only node that reads it; a
    copy that several nodes read stays.
    """
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


@dataclass(frozen=True)
class CopyBytes:
    """A reader's own weights: `staying` all the time, or `passing`, while its node runs."""

    staying: int = 0
    passing: int = 0


def own_copies(groups: tuple[NodeGroup, ...], assignments: Assignments) -> dict[str, CopyBytes]:
    """By node group; a copy that two node groups share counts for the first. A reader of older weights has,
    while it runs in the evaluation, a copy of the newest as well; a server of these is always there."""
    lie = shardings(groups, assignments)
    trained = {(u.model, lie[u.name]) for u in groups if u.role == "train"}
    readers = [u for u in groups if assignments[u.name].candidate.copy_bytes]
    counts = Counter[object]()
    for group in readers:
        counts[group.model, lie[group.name]] += len(group.nodes)
    found: dict[str, CopyBytes] = {u.name: CopyBytes() for u in groups}
    seen: set[object] = set(trained)
    for group in readers:
        key, size = (group.model, lie[group.name]), assignments[group.name].candidate.copy_bytes
        if key not in seen:
            found[group.name] = CopyBytes(staying=size) if counts[key] > 1 else CopyBytes(passing=size)
        seen.add(key)
    for group in (u for u in groups if u.lag and u.evaluated and (u.model, lie[u.name]) not in trained):
        size = assignments[group.name].candidate.idle_bytes
        found[group.name] = CopyBytes(staying=size) if group.served else CopyBytes(passing=size)
    return found
