"""Every model on devices of its own, and generation on yet others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hflow.compiler.candidates.node_groups import Candidate, Candidates, NodeGroup
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.published.placed_candidates import PlacedCandidates
from hflow.compiler.planner.published.stages import StageTimes, in_turn, stage_sum_s, stage_times
from hflow.compiler.planner.search_space import SearchSpace


@dataclass(frozen=True)
class Standalone:
    """Node groups on devices of their own: their candidates, and what they take in each stage."""

    candidates: Mapping[str, Candidate]
    times: StageTimes


BySize = Mapping[int, Standalone]  # of the same node groups, by number of devices


def best_split(
    space: SearchSpace, models: Mapping[str, Candidates], generating: Mapping[str, Candidates]
) -> PlacedCandidates | None:
    """The split of the devices, in powers of two, with the least sum of stages; None where none fits.

    Args:
        models, generating: the candidates of node groups that do not, and that do, generate with a trained
        model.
    """
    members = [*_of_models(space, models), *(_fastest(space, name, c) for name, c in generating.items())]
    sizes = [[n for n in each if n.bit_count() == 1] for each in members]
    splits = [
        (stage_sum_s(g[n].times for g, n in zip(members, counts)), counts)
        for counts in _splits(sizes, space.num_devices)
    ]
    if not splits:
        return None
    _, counts = min(splits)
    firsts = Allocation(tuple(() for _ in counts), counts).firsts
    chosen = zip(members, counts, firsts)
    return {name: (candidate, first) for g, n, first in chosen for name, candidate in g[n].candidates.items()}


def _of_models(space: SearchSpace, candidates: Mapping[str, Candidates]) -> Iterator[BySize]:
    """What trains a model and scores with it stays together."""
    for model in space.models:
        groups = [u for u in space.groups if u.model == model and u.name in candidates]
        counts = sorted(set[int].intersection(*(set(candidates[u.name]) for u in groups)))
        each = ((n, _standalone(space, [(u, candidates[u.name][n][0]) for u in groups])) for n in counts)
        yield {n: made for n, made in each if made}


def _fastest(space: SearchSpace, name: str, candidates: Candidates) -> BySize:
    group = next(u for u in space.groups if u.name == name)
    found: dict[int, Standalone] = {}
    for n, each in candidates.items():
        alone = [made for candidate in each if (made := _standalone(space, [(group, candidate)]))]
        if alone:
            found[n] = min(alone, key=lambda made: sum(made.times))
    return found


def _standalone(space: SearchSpace, members: Sequence[tuple[NodeGroup, Candidate]]) -> Standalone | None:
    """None where the memory does not suffice."""
    trainer = next((c for u, c in members if u.role == "train"), None)
    kept = sum(c.idle_bytes + c.copy_beside(trainer) for _, c in members)
    free_memory = space.draft.cluster.device.usable_bytes - kept
    times = [t for u, c in members if (t := stage_times(u, c, free_memory, space.rounds))]
    return Standalone({u.name: c for u, c in members}, in_turn(times)) if len(times) == len(members) else None


def _splits(sizes: Sequence[Sequence[int]], total: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each group one of its `sizes`, `total` devices at most."""
    if not sizes:
        yield ()
        return
    for count in (n for n in sizes[0] if n <= total):
        yield from ((count, *rest) for rest in _splits(sizes[1:], total - count))
