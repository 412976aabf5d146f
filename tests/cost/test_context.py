"""Rows cut over context-parallel ranks, and over tp by sequence parallelism, against closed forms."""

from __future__ import annotations

import pytest

from hflow.cost.activation_memory import layer_activation_bytes
from hflow.cost.comm import REACHED
from hflow.cost.compute import train_passes_s, update_s
from hflow.cost.execution import Execution
from hflow.cost.resident_memory import optimizer_bytes, resident_bytes
from hflow.cost.working_memory import working_bytes
from hflow.plan.cluster import Cluster
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload

LLAMA = NAMED_SHAPES["llama-7b"].with_head("scalar")
TOKENS, LAYERS, HIDDEN, SP = 32_768, 32, 4096, Strategy(sp=True)
TRAIN = Workload(8, TOKENS // 2, TOKENS // 2, optimizer_steps=1, rows_per_update=8)
ONE, CP4, TP8 = Mesh.of((0,)), Mesh.of((0, 1, 2, 3), cp=4), Mesh.of(tuple(range(8)), tp=8)
NVLINK = 300e9 * REACHED["cuda"]


def test_ranks_share_the_work_and_gather_keys_and_values(plain: Cluster) -> None:
    """Forward all of them but its own, as their gradients backward: 3/4 of 2 x 4096 numbers of 2 bytes."""
    whole, cut = (train_passes_s(Execution(LLAMA, "bf16", TRAIN, m, 1, plain)) for m in (ONE, CP4))
    gathered = 2 * LAYERS * 3 / 4 * TOKENS * 2 * HIDDEN * 2 / NVLINK
    assert cut == pytest.approx(whole / 4 + 8 * gathered)


def test_gradients_are_summed_over_ranks_that_share_rows(plain: Cluster) -> None:
    """As over data-parallel ones, whose weights are the same, too."""
    for strategy in (PLAIN, Strategy(zero=1)):
        seconds = [update_s(LLAMA, "bf16", m, plain, strategy) for m in (CP4, Mesh.of((0, 1, 2, 3), dp=4))]
        assert seconds[0] == seconds[1] > 0
    assert resident_bytes(LLAMA, "bf16", CP4, False) == resident_bytes(LLAMA, "bf16", ONE, False)
    split, held = (optimizer_bytes(LLAMA, "bf16", CP4, strategy) for strategy in (Strategy(zero=1), PLAIN))
    assert split == pytest.approx(held / 4, rel=1e-6)


def test_activations_are_cut_but_for_keys_and_values() -> None:
    """Kept without recompute: a quarter of each layer's, but keys and values of all tokens. The backward pass
    of attention holds these by rank and two gradients of them, when the MLP's three widths are gone."""
    state, mlp = TOKENS // 4 * HIDDEN * 2, 3 * TOKENS // 4 * LLAMA.ffn * 2
    own = layer_activation_bytes(LLAMA, "bf16", TOKENS // 4, CP4) + 3 * 2 * state
    backward = state + 3 * 4 * 2 * state + (4 + 1.5) * state - mlp
    kept = working_bytes("train", LLAMA, "bf16", TRAIN, CP4, 1)
    assert TRAIN.response <= TOKENS / 2, "a rank has half of its tokens from before"
    unread = 2 * state / 2  # two hidden states, which the last MLP does not need
    assert kept == pytest.approx(LAYERS * own + backward - unread, rel=1e-3)
    recomputed = working_bytes("train", LLAMA, "bf16", TRAIN, CP4, 1, Strategy("full"))
    assert recomputed == pytest.approx(
        (LAYERS - 2) * state + own + backward, rel=1e-3
    )  # the last one is gone
    assert working_bytes("score", LLAMA, "bf16", TRAIN, CP4, 1) < working_bytes(
        "score", LLAMA, "bf16", TRAIN, ONE, 1
    )


def test_sequence_parallelism_splits_norms_and_gathers_twice_more(plain: Cluster) -> None:
    """Korthikanti et al. (arXiv:2205.05198), table 2: 34 bytes per token and hidden dim, all over tp."""
    split = layer_activation_bytes(LLAMA, "bf16", TOKENS, TP8, Strategy(sp=True))
    assert split == pytest.approx(34 * TOKENS * HIDDEN / 8, rel=0.15)
    runs = [Execution(LLAMA, "bf16", TRAIN, TP8, 1, plain, strategy) for strategy in (PLAIN, SP)]
    without, with_sp = map(train_passes_s, runs)
    # an all-reduce of embeddings is two gathers; there are three: theirs, back, and of what the head reads
    regathered = (2 * LAYERS + 1) * 7 / 8 * TOKENS * HIDDEN * 2 / NVLINK
    norms = 3 * 10 * LAYERS * HIDDEN * 2 * TOKENS / 2.039e12
    assert with_sp == pytest.approx(without + 8 * (regathered - 7 / 8 * norms))
    experts = NAMED_SHAPES["qwen3-30b-a3b"]  # which keep the copies of tokens that they have read
    once = 48 * 7 / 8 * TOKENS * 2048 * 2 / NVLINK
    assert Execution(experts, "bf16", TRAIN, TP8, 1, plain, SP).regathered_s(TOKENS) == pytest.approx(once)
