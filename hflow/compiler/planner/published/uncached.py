"""Generation without a KV cache: each new token reads everything before it again."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.compiler.candidates.node_groups import Options, Unit
from hflow.compiler.candidates.pricing import Pricing
from hflow.compiler.planner.space import Space
from hflow.plan.layout import Mesh
from hflow.plan.strategy import Strategy


def without_cache(space: Space, unit: Unit, options: Options) -> Options:
    """The same layouts, priced so."""
    draft = space.draft
    pricing = _Uncached(unit, draft.graph.model(unit.model), draft.shapes[unit.model], (), draft.cluster)
    return {
        n: tuple(o for each in found for o in pricing.options(each.mesh(0))) for n, found in options.items()
    }


class _Uncached(Pricing):
    def _strategies(self, mesh: Mesh) -> Iterator[Strategy]:
        yield Strategy(kv_cache=False)
