"""Which layers each pipeline stage holds.

Where pp does not divide the layers, all stages but the first and the last hold one number of them, the least
with which they suffice, and these two share the rest: the last one, which also has the head, no more than the
first. Megatron knows such splits (`num_layers_in_first_pipeline_stage`).
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from math import ceil


@lru_cache(maxsize=4096)
def stage_sizes(num_layers: int, pp: int) -> tuple[int, ...]:
    """The layers of each stage; nothing where a stage would have none."""
    if num_layers % pp == 0:
        return (num_layers // pp,) * pp
    most = ceil(num_layers / pp)
    ends = num_layers - (pp - 2) * most
    return (ceil(ends / 2), *(most,) * (pp - 2), ends // 2) if ends > 1 else ()


def largest_stage(num_layers: int, pp: int) -> int:
    """Layers of the stage that has most of them."""
    return ceil(num_layers / pp)


def stage_chunks(num_layers: int, pp: int, stage: int, vpp: int = 1) -> tuple[range, ...]:
    """The layers of each of the `vpp` chunks of a stage. Several chunks are of one size (pp·vpp divides
    `num_layers`): those of stage r are number r, r + pp, and so on of all."""
    if vpp == 1:
        sizes = stage_sizes(num_layers, pp)
        first = sum(sizes[:stage])
        return (range(first, first + sizes[stage]),)
    size = num_layers // (pp * vpp)
    firsts = range(stage * size, num_layers, pp * size)
    return tuple(range(first, first + size) for first in firsts)


def stage_of_layer(num_layers: int, pp: int, layer: int, vpp: int = 1) -> int:
    if num_layers % (pp * vpp) == 0:
        return layer * pp * vpp // num_layers % pp
    return bisect_right(_ends(num_layers, pp), layer)


@lru_cache(maxsize=4096)
def _ends(num_layers: int, pp: int) -> tuple[int, ...]:
    """After the last layer of each stage."""
    return tuple(accumulate(stage_sizes(num_layers, pp)))
