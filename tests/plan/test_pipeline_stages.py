"""How layers are shared among pipeline stages, against brute force."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hflow.plan.pipeline_stages import largest_stage, stage_chunks, stage_of_layer, stage_sizes

LAYERS, STAGES = st.integers(1, 130), st.integers(1, 40)


@pytest.mark.parametrize(
    ("num_layers", "pp", "sizes"),
    [
        (32, 4, (8, 8, 8, 8)),
        (94, 8, (11, 12, 12, 12, 12, 12, 12, 11)),
        (61, 16, (3, *[4] * 14, 2)),
        (5, 2, (3, 2)),
        (9, 8, ()),
    ],
)
def test_the_ends_are_no_fuller_than_the_middle(num_layers: int, pp: int, sizes: tuple[int, ...]) -> None:
    assert stage_sizes(num_layers, pp) == sizes


@given(LAYERS, STAGES)
def test_stages_share_all_layers_in_order(num_layers: int, pp: int) -> None:
    sizes = stage_sizes(num_layers, pp)
    if not sizes:
        assert num_layers % pp and num_layers - (pp - 2) * ceil(num_layers / pp) < 2
        return
    chunks = [stage_chunks(num_layers, pp, stage) for stage in range(pp)]
    assert [layer for (layers,) in chunks for layer in layers] == list(range(num_layers))
    assert [len(layers) for (layers,) in chunks] == list(sizes)
    owners = [stage_of_layer(num_layers, pp, layer) for layer in range(num_layers)]
    assert all(owners[layer] == stage for stage, (layers,) in enumerate(chunks) for layer in layers)


@given(LAYERS, STAGES)
def test_no_other_split_has_a_smaller_largest_stage(num_layers: int, pp: int) -> None:
    sizes = stage_sizes(num_layers, pp)
    if sizes:
        assert min(sizes) > 0 and sizes[-1] <= sizes[0] <= max(sizes)
        assert max(sizes) == largest_stage(num_layers, pp) == -(-num_layers // pp)
        assert len({*sizes[1:-1]}) <= 1, "Megatron gives all stages between the ends as many"


@given(st.integers(1, 8), st.integers(2, 8), st.integers(2, 4))
def test_chunks_take_turns(size: int, pp: int, vpp: int) -> None:
    num_layers = size * pp * vpp
    owners = [stage_of_layer(num_layers, pp, layer, vpp) for layer in range(num_layers)]
    assert owners == [layer // size % pp for layer in range(num_layers)]
    held = [[*map(list, stage_chunks(num_layers, pp, stage, vpp))] for stage in range(pp)]
    assert sorted(layer for chunks in held for chunk in chunks for layer in chunk) == list(range(num_layers))
    assert all(owners[layer] == stage for stage, chunks in enumerate(held) for c in chunks for layer in c)
