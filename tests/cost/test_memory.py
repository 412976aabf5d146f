"""Memory of the models of HybridFlow's evaluation against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.cost.activation_memory import head_bytes, kv_cache_bytes, layer_activation_bytes
from hflow.cost.resident_memory import optimizer_bytes, resident_bytes
from hflow.cost.working_memory import working_bytes
from hflow.plan.cluster_file import load_cluster
from hflow.plan.flops import expert_parameters, forward_flops, matmul_parameters, read_parameters
from hflow.plan.frozen import untrained_layers
from hflow.plan.layout import Mesh
from hflow.plan.logits import LOGITS_BYTES
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import active_parameters, num_parameters
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload

LLAMA_7B, LLAMA_70B = NAMED_SHAPES["llama-7b"], NAMED_SHAPES["llama-70b"]
PARAMETERS_7B = 6_738_415_616  # Llama 2 7B, as published
ONE = Mesh.of((0,))
KIB, GIB = 2**10, 2**30
BACKWARD = 2048 * 2 * (4096 + 3 * 11_008)  # of a layer of 7B, in bf16


def test_a_token_of_7b_costs_twice_its_matrices() -> None:
    matrices = PARAMETERS_7B - 32_000 * 4096  # all but the embedding table; norms are counted, being few
    assert matmul_parameters(LLAMA_7B) == matrices
    attention = 4 * 4096 * 1024 * 32
    assert forward_flops(LLAMA_7B, 10, 1024) == 10 * (2 * matrices + attention)


@pytest.mark.parametrize(
    ("model", "kib"), [("llama-7b", 512), ("llama-13b", 800), ("llama-70b", 320)], ids=str
)
def test_kv_cache_of_a_token(model: str, kib: int) -> None:
    assert kv_cache_bytes(NAMED_SHAPES[model], "bf16", 1, ONE) == kib * KIB
    assert kv_cache_bytes(NAMED_SHAPES[model], "bf16", 6, Mesh.of((0, 1, 2, 3), tp=4)) == 6 * kib * KIB / 4


def test_training_state_of_7b() -> None:
    assert resident_bytes(LLAMA_7B, "bf16", ONE, False) == 2 * PARAMETERS_7B
    assert resident_bytes(LLAMA_7B, "bf16", ONE, True) == 18 * PARAMETERS_7B
    assert resident_bytes(LLAMA_7B, "f32", ONE, True) == 16 * PARAMETERS_7B
    eight = Mesh.of(tuple(range(8)), dp=8)
    assert resident_bytes(LLAMA_7B, "bf16", eight, True) == 18 * PARAMETERS_7B
    assert resident_bytes(LLAMA_7B, "bf16", eight, True, Strategy(zero=1)) == (6 + 12 / 8) * PARAMETERS_7B
    assert resident_bytes(LLAMA_7B, "bf16", eight, True, Strategy(zero=3)) == 18 / 8 * PARAMETERS_7B
    assert optimizer_bytes(LLAMA_7B, "bf16", eight) == 12 * PARAMETERS_7B


@pytest.mark.parametrize(
    ("model", "ppo", "remax"),
    [("llama-7b", 8, 8), ("llama-13b", 16, 8), ("llama-34b", 32, 16), ("llama-70b", 64, 32)],
)
def test_the_papers_smallest_clusters(model: str, ppo: int, remax: int) -> None:
    """HybridFlow's figures 9 and 10 begin where the models' state takes at most 80% of the A100s' 80 GB
    (PPO trains two models and reads two, ReMax trains one and reads two), on 8 GPUs times a power of two."""
    trained, read = (resident_bytes(NAMED_SHAPES[model], "bf16", ONE, trains) for trains in (True, False))
    assert _smallest(2 * trained + 2 * read) == ppo
    assert _smallest(trained + 2 * read) == remax


@pytest.mark.parametrize(
    ("model", "trained", "gpus"),
    [("llama-34b", 2, 16), ("llama-70b", 2, 32), ("llama-34b", 1, 8), ("llama-70b", 1, 16)],
)
def test_on_half_of_these_the_state_alone_exceeds_the_memory(model: str, trained: int, gpus: int) -> None:
    """PPO (two trained models) and ReMax (one); both read two more."""
    train, read = (resident_bytes(NAMED_SHAPES[model], "bf16", ONE, trains) for trains in (True, False))
    usable = load_cluster("a100x8").device.usable_bytes
    assert trained * train + 2 * read > gpus * usable
    assert trained * train + 2 * read < 2 * gpus * usable


def test_what_ppo_of_13b_leaves_of_8_gpus() -> None:
    """The exception: the state of 13B fits on 8 GPUs, with room to generate with the trained weights. The
    engine of the paper holds a second copy, over 4 GPUs (figure 14), and hardly a row beside it."""
    eight = Mesh.of(tuple(range(8)), tp=8)
    shape = NAMED_SHAPES["llama-13b"]
    state = sum(2 * resident_bytes(shape, "bf16", eight, trains) for trains in (True, False))
    free = load_cluster("a100x8").device.usable_bytes - state
    assert 5e9 < free < 8e9
    four = Mesh.of(tuple(range(4)), tp=4)
    row = kv_cache_bytes(shape, "bf16", 2048, four)
    assert (free - resident_bytes(shape, "bf16", four, False)) // row <= 1


def _smallest(state_bytes: int) -> int:
    return next(8 * 2**i for i in range(8) if state_bytes <= 0.8 * 80e9 * 8 * 2**i)


def test_activations_are_korthikantis_up_to_the_shape_of_the_mlp() -> None:
    tokens = 2048
    own = layer_activation_bytes(LLAMA_7B, "bf16", tokens, ONE)
    assert own == 2 * tokens * (4 * 4096 + 5 * 4096 + 3 * 11_008)
    assert own == pytest.approx(34 * tokens * 4096, rel=0.15)  # with dropout masks and GELU
    split = layer_activation_bytes(LLAMA_7B, "bf16", tokens, Mesh.of(tuple(range(8)), tp=8))
    assert split == pytest.approx(tokens * 4096 * (10 + 24 / 8), rel=0.15)


def test_a_stage_keeps_one_micro_batch_per_stage_behind_it() -> None:
    """And holds, of one layer's backward pass, a gradient and three of the MLP's widths."""
    mesh = Mesh.of((0, 1, 2, 3), pp=4)
    layers = 8 * layer_activation_bytes(LLAMA_7B, "bf16", 2048, mesh)
    scalar = LLAMA_7B.with_head("scalar")
    for rows, in_flight in ((1, 1), (2, 2), (4, 4), (16, 4)):
        work = Workload(rows, 1024, 1024, optimizer_steps=1, rows_per_update=rows)
        needed = working_bytes("train", scalar, "bf16", work, mesh, 1)
        assert needed == pytest.approx(in_flight * layers + BACKWARD, rel=1e-3)


def test_recomputation_keeps_the_input_of_each_layer_and_one_layer() -> None:
    work = Workload(1, 1024, 1024, optimizer_steps=1, rows_per_update=1)
    scalar = LLAMA_7B.with_head("scalar")
    needed = working_bytes("train", scalar, "bf16", work, ONE, 1, Strategy("full"))
    layer = layer_activation_bytes(LLAMA_7B, "bf16", 2048, ONE)
    # While the layer before the last is repeated, the input of the last one is gone.
    assert needed == 30 * 2048 * 4096 * 2 + layer + BACKWARD
    plain = working_bytes("train", scalar, "bf16", work, ONE, 1)
    unread = 1024 * (2 * 4096 + 3 * 11008) * 2  # of the prompt, by the last MLP and its norm
    assert plain == 32 * layer - unread + BACKWARD // 2


def test_layers_before_the_first_trained_weights_keep_nothing() -> None:
    shape = replace(LLAMA_7B, num_layers=4)
    work = Workload(1, 1024, 1024, optimizer_steps=1, rows_per_update=1)
    layer = layer_activation_bytes(shape, "bf16", 2048, ONE)
    skipped = untrained_layers(shape, ("embed*", "layers.[01].*"))
    assert skipped == 2 and untrained_layers(shape, ("layers.[01].*",)) == 0, "the embedding learns"
    whole, cut = (working_bytes("train", shape, "bf16", work, ONE, 1, PLAIN, n) for n in (0, skipped))
    assert whole - cut == 2 * layer


def test_scoring_holds_the_layers_or_then_the_head() -> None:
    """Four hidden states and three of the MLP's widths; or two, and what the head needs."""
    work = Workload(4, 1024, 1024)
    few, many = (replace(LLAMA_7B, vocab=vocab) for vocab in (1000, 256_000))
    assert working_bytes("score", few, "f32", work, ONE, 1) == 2048 * 4 * (4 * 4096 + 3 * 11_008)
    long = Workload(4, 16, 2048)
    head = head_bytes("score", many, "f32", long, ONE, 1)
    states = 2 * 2064 * 4096 * 4
    assert working_bytes("score", many, "f32", long, ONE, 1) == max(
        states + head, 2064 * 4 * (4 * 4096 + 3 * 11_008)
    )


@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("bf16", 2)])
def test_few_logits_of_responses_are_kept_with_their_gradient_and_two_copies(dtype: str, size: int) -> None:
    work = Workload(4, 1024, 64, optimizer_steps=1, rows_per_update=4)
    for tp in (1, 4):
        mesh, logits = Mesh.of(tuple(range(tp)), tp=tp), 4 * 64 * 32_000 // tp
        assert 16 * logits <= LOGITS_BYTES
        assert head_bytes("train", LLAMA_7B, dtype, work, mesh, 4) == logits * (2 * size + 2 * 4)
        assert head_bytes("score", LLAMA_7B, dtype, work, mesh, 4) == logits * (size + 2 * 4)


def test_many_logits_take_as_much_as_few_and_what_grows_with_the_tokens() -> None:
    """A tile, the hidden states that predict, and their gradient: in bf16, and its sum in float32."""
    work = Workload(4, 1024, 1024, optimizer_steps=1, rows_per_update=4)
    hidden = 4 * 1024 * 4096
    for tp in (1, 4):
        mesh = Mesh.of(tuple(range(tp)), tp=tp)
        train = head_bytes("train", LLAMA_7B, "bf16", work, mesh, 4)
        assert train == LOGITS_BYTES + hidden * (2 + 4 + 2)
        assert head_bytes("score", LLAMA_7B, "bf16", work, mesh, 4) == LOGITS_BYTES + hidden * 2
    train = head_bytes("train", LLAMA_7B, "f32", work, ONE, 4)
    assert train == LOGITS_BYTES + hidden * (4 + 4)


ATTENTION = {"inputs": 2, "queries": 1, "keys and values": 1}  # what a layer needs from its input to scores
BEHIND = {"inputs": 2, "found by tokens": 1, "gate, up and product": 3}


@pytest.mark.parametrize(
    ("name", "copies", "behind"),
    [
        ("gpt-oss-20b", 3, BEHIND | {"copies of tokens": 2}),  # softmax, gradient, their product
        ("gemma-2-2b", 4, BEHIND | {"inputs": 4}),  # and tanh; two norms more
    ],
)
@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("bf16", 2)])
def test_scores_are_there_when_what_stands_behind_attention_is_gone(
    name: str, copies: int, behind: dict[str, int], dtype: str, size: int
) -> None:
    """Of two layers the first is whole, and of the last only what comes before its scores. 1,024 tokens and
    8 heads: 512 queries at once; the last ones have 1,024 keys each. MLPs of one unit take no part."""
    named = NAMED_SHAPES[name]
    moe = replace(named.moe, ffn=1, top_k=1) if named.moe else None
    shape = replace(
        named, num_layers=2, hidden=32, num_heads=8, num_kv_heads=4, head_dim=4, ffn=1, moe=moe
    ).with_head("scalar")
    width = {
        "inputs": 32, "queries": 32, "keys and values": 32, "found by tokens": 32, "copies of tokens": 32,
        "gate, up and product": 1,
    }  # fmt: skip
    before, after = (sum(width[k] * n for k, n in part.items()) for part in (ATTENTION, behind))
    gradients = 32 + 32 + 32 + 32  # of the layer's output, of what was found, a part of it, and of queries
    scores = 8 * 512 * 1024 * 4 * copies
    work = Workload(1, 512, 512, optimizer_steps=1, rows_per_update=1)
    needed = working_bytes("train", shape, dtype, work, ONE, 1)
    assert needed == 1024 * size * (2 * before + after + gradients) + 1024 * 4 * 32 + scores


def test_generation_keeps_the_cache_of_all_rows_at_their_greatest_length() -> None:
    work = Workload(256, 1024, 1024)
    two = [working_bytes("generate", LLAMA_7B, "bf16", work, ONE, wave) for wave in (1, 33)]
    assert two[1] - two[0] >= 32 * 2048 * 512 * KIB == 32 * GIB
    assert two[1] - two[0] < 1.2 * 32 * GIB


def test_decoding_reads_the_experts_that_some_row_chooses() -> None:
    moe = NAMED_SHAPES["qwen3-30b-a3b"]
    embedding = moe.vocab * moe.hidden
    assert read_parameters(moe, 1) == pytest.approx(active_parameters(moe) - embedding)
    assert read_parameters(moe, 10_000) == pytest.approx(num_parameters(moe) - embedding)
    assert read_parameters(LLAMA_70B, 7) == matmul_parameters(LLAMA_70B)
    experts = moe.moe
    assert experts
    size = 3 * moe.hidden * experts.ffn * moe.num_layers
    shared = num_parameters(moe) - embedding - experts.num_experts * size
    both_choose_8_of_128 = 128 * (1 - (120 / 128) ** 2)  # expected size of the union
    assert read_parameters(moe, 2) == pytest.approx(shared + both_choose_8_of_128 * size)
    two_parts = read_parameters(moe, 1, ep=2)
    assert two_parts == pytest.approx(shared + both_choose_8_of_128 / 2 * size), "the rows of both replicas"


MOE = NAMED_SHAPES["qwen3-30b-a3b"]
EXPERTS = 48 * 128 * 3 * 2048 * 768  # layers, experts, matrices, hidden, width
COMMON = num_parameters(MOE) - EXPERTS


def test_experts_are_split_over_ranks_that_share_them() -> None:
    eight = Mesh.of(tuple(range(8)), dp=8)
    assert expert_parameters(MOE) == EXPERTS
    for ep in (1, 2, 8):
        held = COMMON + EXPERTS // ep
        assert resident_bytes(MOE, "bf16", eight, False, Strategy(ep=ep)) == 2 * held
        assert resident_bytes(MOE, "bf16", eight, True, Strategy(ep=ep)) == 18 * held
        split = resident_bytes(MOE, "bf16", eight, True, Strategy(ep=ep, zero=1))
        assert split == pytest.approx(6 * held + 12 * (COMMON + EXPERTS) / 8, rel=1e-9)
        fully = resident_bytes(MOE, "bf16", eight, True, Strategy(ep=ep, zero=3))
        assert fully == pytest.approx(18 * (COMMON + EXPERTS) / 8, rel=1e-6)
    over_tp = resident_bytes(MOE, "bf16", Mesh.of(tuple(range(8)), dp=4, tp=2), False, Strategy(ep=4))
    assert over_tp == pytest.approx(2 * (COMMON / 2 + EXPERTS / 8), rel=1e-2), "norms and routers are whole"


def test_a_layer_of_experts_keeps_the_copies_of_each_token() -> None:
    """8 copies go to experts and come back, of 2048 numbers each. The norms of queries and keys read a copy
    of the former and a view of all of QKV."""
    plain = 4 * 2048 + 3 * 4096 + 2 * 512 + 3 * 8 * 768 + 4096 + (4096 + 2 * 512)
    assert layer_activation_bytes(MOE, "bf16", 10, ONE) == 10 * 2 * (plain + 2 * 8 * 2048)


def test_generation_without_a_cache_needs_a_forward_pass_over_all_tokens() -> None:
    work = Workload(256, 1024, 1024)
    needed = working_bytes("generate", LLAMA_7B, "bf16", work, ONE, 64, Strategy(kv_cache=False))
    widest = 2 * 4096 + max(4 * 4096, 3 * 11_008)  # residual, norm, and attention or MLP
    assert needed == 64 * 2048 * 2 * widest


def test_zero_3_reads_two_layers_at_a_time() -> None:
    work, eight = Workload(8, 1024, 1024), Mesh.of(tuple(range(8)), dp=8)
    whole, split = (
        working_bytes("score", LLAMA_7B, "bf16", work, eight, 1, s) for s in (PLAIN, Strategy(zero=3))
    )
    assert split - whole == pytest.approx(2 * 2 * PARAMETERS_7B / 32, rel=1e-6)


def test_a_part_of_each_gpu_stays_free() -> None:
    a100 = load_cluster("a100x8").device
    assert a100.usable_bytes == 72 * 10**9
    assert load_cluster("local").device.usable_bytes == 4 * 10**9, "no allocator stands between"
