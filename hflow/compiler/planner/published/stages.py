"""HybridFlow's price of a mapping (arXiv:2409.19256, Algorithm 1's d_cost): three stages in turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hflow.compiler.candidates.node_groups import Candidate, NodeGroup
from hflow.graph.ir import OpKind

STAGES: tuple[OpKind, ...] = (
    "generate",
    "score",
    "train",
)  # generation, preparation, training: what their nodes do
StageTimes = tuple[float, ...]  # seconds of each stage


def stage_times(
    group: NodeGroup, candidate: Candidate, free_bytes: int, rounds: Mapping[str, int]
) -> StageTimes | None:
    """What a node group does in each stage, every node in its fastest configuration that needs at most
    `free_bytes`; None where a node has none.

    Args:
        rounds: how often each node runs in a step.
    """
    times: dict[OpKind, float] = dict.fromkeys(STAGES, 0.0)
    for node, configs in zip(group.nodes, candidate.fronts):
        config = configs.fastest(free_bytes)
        if config is None:
            return None
        times[node.op] += config.time_s * rounds[node.name]
    return tuple(times.values())


def in_turn(members: Iterable[StageTimes]) -> StageTimes:
    """What a set of models does that share devices."""
    return tuple(map(sum, zip(*members)))


def stage_sum_s(sets: Iterable[StageTimes]) -> float:
    """Each stage lasts as long as the set that is busiest in it; no stage begins before the last has ended.
    Nothing that moves between nodes counts."""
    return sum(map(max, zip(*sets)))
