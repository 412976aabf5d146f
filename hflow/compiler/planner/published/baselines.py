"""The plans of other systems, as HybridFlow's evaluation describes them (arXiv:2409.19256, section 8.1).

Each system fixes who shares devices and how models are split; what it leaves open is chosen best. They are
plans like all others, priced for the same engines and links: what a system loses otherwise is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from hflow.compiler.candidates.node_groups import Candidate, Candidates, NodeGroup
from hflow.compiler.options import Planner
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Members
from hflow.compiler.planner.published.mapper import Mapper
from hflow.compiler.planner.published.placed_candidates import (
    PlacedCandidates,
    as_assignments,
    candidates_with,
    refuse_wishes,
    unproven,
)
from hflow.compiler.planner.published.standalone import best_split
from hflow.compiler.planner.published.uncached import without_cache
from hflow.compiler.planner.search import SearchResult
from hflow.compiler.planner.search_space import SearchSpace
from hflow.diagnostics import Diagnostic, HflowError


def baseline(space: SearchSpace) -> SearchResult:
    """The fastest of the plans that the system named by the draft's candidates may have. Raises HF305 where
    none fits, HF309 for pins and placements, and where graph or cluster do not suit the system."""
    refuse_wishes(space.draft)
    best = Incumbent(space)
    for placed in SYSTEMS[space.draft.options.planner](space):
        best.offer(as_assignments(placed))
    return unproven(best, best.explored)


def deepspeed_chat(space: SearchSpace) -> Iterator[PlacedCandidates]:
    """All models on all devices: ZeRO-3 to train and score, tensor parallelism inside hosts to generate."""
    choices = {
        name: _on_most(candidates) for name, candidates in (_fully_split(space) | _generating(space)).items()
    }
    for chosen in product(*choices.values()):
        yield {name: (candidate, 0) for name, candidate in zip(choices, chosen)}


def openrlhf(space: SearchSpace) -> Iterator[PlacedCandidates]:
    """Each model on devices of its own, with ZeRO-3; generation on yet others, with tensor parallelism. The
    numbers of devices are powers of two."""
    placed = best_split(space, _fully_split(space), _generating(space))
    if placed:
        yield placed


def nemo_aligner(space: SearchSpace) -> Iterator[PlacedCandidates]:
    """Models with an ``lm`` head on one half of the devices, the others on the other; generation without a KV
    cache, with the tensor parallelism of training (its stages become replicas)."""
    generation = {u.name: without_cache(space, u, _generating(space)[u.name]) for u in _generators(space)}
    mapper = Mapper(space, generation, _as_trained)
    half = space.num_devices // 2
    language, others = (mapper.on(members, half) for members in _halves(space))
    if language and others:
        placed = {name: (candidate, 0) for name, candidate in language.candidates.items()}
        yield placed | {name: (candidate, half) for name, candidate in others.candidates.items()}


SYSTEMS: Mapping[Planner, Callable[[SearchSpace], Iterator[PlacedCandidates]]] = {
    "deepspeed-chat": deepspeed_chat,
    "openrlhf": openrlhf,
    "nemo-aligner": nemo_aligner,
}


def _on_most(candidates: Candidates) -> tuple[Candidate, ...]:
    """The candidates on the most devices."""
    return candidates[max(candidates)] if candidates else ()


def _fully_split(space: SearchSpace) -> dict[str, Candidates]:
    """Of node groups that do not generate, by number of devices: weights, gradients, optimizer split over
    all."""
    groups = [u for u in space.groups if u.role != "generate"]
    whole = candidates_with(space.draft, groups, zero=0, offload=False)
    split = candidates_with(space.draft, groups, zero=3, offload=False)
    return {u.name: _replicas({1: whole[u.name].get(1, ()), **split[u.name]}) for u in groups}


def _replicas(candidates: Candidates) -> Candidates:
    """Those with data parallelism alone."""
    found = {n: tuple(c for c in each if c.dp == n) for n, each in candidates.items()}
    return {n: each for n, each in found.items() if each}


def _generators(space: SearchSpace) -> list[NodeGroup]:
    return [u for u in space.groups if u.role == "generate"]


def _generating(space: SearchSpace) -> dict[str, Candidates]:
    return candidates_with(space.draft, _generators(space))


def _as_trained(train: Candidate, generate: Candidate) -> bool:
    return (train.num_devices, train.tp) == (generate.num_devices, generate.tp)


def _halves(space: SearchSpace) -> tuple[Members, Members]:
    """The models by head. Raises HF309 where they, or the devices, make no two halves."""
    draft = space.draft
    language = tuple(m for m in space.models if draft.graph.model(m).head == "lm")
    others = tuple(m for m in space.models if m not in language)
    if language and others and space.num_devices % 2 == 0:
        return language, others
    problem = f"`{draft.graph.name}` has no model with {'a scalar' if language else 'an lm'} head"
    if language and others:
        problem = f"`{draft.cluster.name}` has an odd number of devices"
    message = (
        f"planner `nemo-aligner` puts models with an lm head on one half, others on the other: {problem}"
    )
    raise HflowError(Diagnostic("HF309", message, help="use another planner"))
