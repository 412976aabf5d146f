"""Generation without a KV cache: each new token reads everything before it again."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.compiler.candidates.node_groups import Candidates, NodeGroup
from hflow.compiler.candidates.pricing import Pricing
from hflow.compiler.planner.search_space import SearchSpace
from hflow.plan.layout import Mesh
from hflow.plan.strategy import Strategy


def without_cache(space: SearchSpace, group: NodeGroup, candidates: Candidates) -> Candidates:
    """The same layouts, priced so."""
    draft = space.draft
    pricing = _Uncached(group, draft.graph.model(group.model), draft.shapes[group.model], (), draft.cluster)
    return {
        n: tuple(c for each in found for c in pricing.candidates(each.mesh(0)))
        for n, found in candidates.items()
    }


class _Uncached(Pricing):
    def _strategies(self, mesh: Mesh) -> Iterator[Strategy]:
        yield Strategy(kv_cache=False)
