"""Models that share one base (`base:` in a graph file): the weights that their adapters leave as they are
exist once, so the models are trained, or score if they are frozen, in one layout on the same devices.

How readers of trained models lie is as free as ever: one that lies otherwise than its trainer has a copy of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hflow.compiler.candidates.node_groups import Candidate, Candidates, NodeGroup
from hflow.graph.ir import Graph
from hflow.plan.sharding import Sharding

SharedBases = Sequence[tuple[str, ...]]  # sets of models, or of the node groups that hold them


def sharing_models(graph: Graph) -> SharedBases:
    """The models of each base that several have, in graph order."""
    found: dict[str, list[str]] = {}
    for model in graph.models:
        found.setdefault(model.base_owner, []).append(model.name)
    return tuple(tuple(models) for models in found.values() if len(models) > 1)


def sharing_groups(graph: Graph, groups: Sequence[NodeGroup]) -> SharedBases:
    """The node groups that train the models of each such base, or score with frozen ones, by name."""
    holders = {group.model: group.name for group in groups if group.holds}
    named = (tuple(holders[m] for m in models if m in holders) for models in sharing_models(graph))
    return tuple(names for names in named if len(names) > 1)


def alike(
    graph: Graph, groups: Sequence[NodeGroup], candidates: Mapping[str, Candidates]
) -> dict[str, Candidates]:
    """Of node groups that share a base the candidates in layouts that all of them have; of all others all."""
    found = dict(candidates)
    for names in sharing_groups(graph, groups):
        layouts = set[Sharding].intersection(*(set(_layouts(candidates[name])) for name in names))
        found |= {name: _in_layouts(candidates[name], layouts) for name in names}
    return found


def lie_alike(shardings: Iterable[Sharding]) -> bool:
    """Whether all are one."""
    return len(set(shardings)) < 2


def by_layout(
    found: Iterable[Sequence[Candidate]],
) -> Iterator[tuple[tuple[Candidate, ...], ...]]:
    """The candidates of some node groups, apart by layout, where each of them has some."""
    every = tuple(found)
    for layout in dict.fromkeys(c.lies for c in every[0]):
        same = tuple(tuple(c for c in own if c.lies == layout) for own in every)
        if all(same):
            yield same


def _layouts(candidates: Candidates) -> Iterator[Sharding]:
    return (candidate.lies for own in candidates.values() for candidate in own)


def _in_layouts(candidates: Candidates, layouts: set[Sharding]) -> Candidates:
    found = {n: tuple(c for c in own if c.lies in layouts) for n, own in candidates.items()}
    return {n: own for n, own in found.items() if own}
