"""Times of a 7B model on A100s against closed forms, and the fit to public measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cost_model import report, shipped_clusters
from hflow.cost.attention import seen_by_rows
from hflow.cost.compute import node_time_s, train_passes_s, update_s
from hflow.cost.context import spares_last_mlp
from hflow.cost.device import device_of, peak_flops, rate
from hflow.cost.execution import Execution
from hflow.cost.generation import decode_s, prefill_s
from hflow.cost.passes import passes
from hflow.graph.adapter import ADAPTER_TARGETS, Adapter
from hflow.graph.ir import OpKind
from hflow.graph.lengths import Lengths
from hflow.plan.cluster import Calibration, Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.flops import attention_flops, latent_flops, mlp_parameters
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import parameters
from hflow.plan.pipeline_stages import stage_sizes
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload

LLAMA = NAMED_SHAPES["llama-7b"]
PARAMETERS = 6_738_415_616
MATRICES = PARAMETERS - 32_000 * 4096
ONE = Mesh.of((0,))
PP4 = Mesh.of((0, 1, 2, 3), pp=4)
TRAIN = Workload(8, 1024, 1024, optimizer_steps=1, rows_per_update=8)
# Of A100s at their peak, in TRAIN: the logits of the responses alone.
HEAD_AGAIN = 2 * 32_000 * 4096 * 8 * 1024 / 312e12


def test_training_takes_six_flop_per_parameter_and_token(plain: Cluster) -> None:
    products = 6 * MATRICES * 8 * 2048 / 312e12
    attention = 3 * 4 * 4096 * 1024 * 32 * 8 * 2048 / 312e12
    passes = train_passes_s(Execution(LLAMA, "bf16", TRAIN, ONE, 1, plain))
    residual = 3 * 10 * 32 * 4096 * 2 * 8 * 2048 / 2.039e12
    expected = products + 2 * attention + residual + HEAD_AGAIN
    assert passes == pytest.approx(expected), "attention runs at half the rate"


def test_masks_of_dropout_are_made_in_every_pass(plain: Cluster) -> None:
    """As long as streaming 100 bytes for each input of an adapter: 32 layers, of 5 matrices that read hidden
    states, of o_proj as many, of down_proj 11,008 columns."""
    with_dropout = {
        name: replace(LLAMA, adapter=Adapter(16, 32.0, ADAPTER_TARGETS, dropout))
        for name, dropout in (("none", 0.0), ("some", 0.1))
    }

    def extra(mesh: Mesh, strategy: Strategy) -> float:
        none, some = (
            train_passes_s(Execution(shape, "bf16", TRAIN, mesh, 1, plain, strategy))
            for shape in with_dropout.values()
        )
        return some - none

    tokens, second = 8 * 2048, 2.039e12 / 100
    assert extra(ONE, Strategy()) == pytest.approx(2 * tokens * 32 * (6 * 4096 + 11_008) / second)
    assert extra(ONE, Strategy(recompute="full")) == pytest.approx(1.5 * extra(ONE, Strategy()))
    tp2, split = Mesh.of((0, 1), tp=2), (4096 + 11_008) / 2
    assert extra(tp2, Strategy()) == pytest.approx(2 * tokens * 32 * (5 * 4096 + split) / second)
    assert extra(tp2, Strategy(sp=True)) == pytest.approx(extra(ONE, Strategy()) / 2)


def test_only_logits_that_are_not_kept_are_made_again(plain: Cluster) -> None:
    """Those of 262 tokens fit into 128 MiB, at 16 bytes each. With kept sets what the loss reads is kept."""
    work = Workload(8, 1024, 262, optimizer_steps=1, rows_per_update=8)
    few, more = (
        train_passes_s(Execution(LLAMA, "bf16", replace(work, response=n), ONE, 1, plain)) for n in (262, 263)
    )
    again = 2 * 32_000 * 4096 * 263 * 8 / 312e12
    per_token = few - train_passes_s(Execution(LLAMA, "bf16", replace(work, response=261), ONE, 1, plain))
    assert more - few == pytest.approx(again + per_token, rel=1e-4)
    with_sets = replace(TRAIN, kept=64)
    assert train_passes_s(Execution(LLAMA, "bf16", TRAIN, ONE, 1, plain)) - train_passes_s(
        Execution(LLAMA, "bf16", with_sets, ONE, 1, plain)
    ) == pytest.approx(HEAD_AGAIN)


def test_a_prompt_passes_once_and_has_no_logits(plain: Cluster) -> None:
    """Of four rows with one prompt of 1,024 tokens, and responses of 1,024 whose last token nothing reads."""
    work, hflows = Workload(8, 1024, 1024, alike=4), replace(plain, whole_rows=False)
    found = node_time_s("score", LLAMA, "bf16", work, ONE, 4, hflows)
    tokens, head = 2 * 1024 + 8 * 1023, 32_000 * 4096
    unread = 3 * 4096 * 11008 * (tokens - 8 * 1024)  # by the head, of the last layer's MLP
    products = 2 * ((MATRICES - head) * tokens - unread + head * 8 * 1024) / 312e12
    attention = 4 * 4096 * 1024 * 32 * 8 * 2048 / 312e12  # kernels take each row whole
    residual = 10 * 32 * 4096 * 2 * tokens / 2.039e12
    assert found == pytest.approx(products + 2 * attention + residual)
    alone = node_time_s("score", LLAMA, "bf16", work, ONE, 1, hflows)
    apart = node_time_s("score", LLAMA, "bf16", replace(work, alike=1), ONE, 1, hflows)
    assert alone == pytest.approx(apart) and alone > found, "each micro-batch has the prompt of its row"


@pytest.mark.parametrize("op", ["score", "train"])
def test_the_last_mlp_runs_where_the_head_reads(plain: Cluster, op: OpKind) -> None:
    """Not on ranks of sp, each of which has other places, nor on one of several stages."""
    hflows, mesh = replace(plain, whole_rows=False), Mesh.of((0, 1), tp=2)
    work = replace(TRAIN, prompt=2048, alike=1)

    def taken(mesh: Mesh, strategy: Strategy = PLAIN, shape: ModelShape = LLAMA) -> float:
        return node_time_s(op, shape, "bf16", work, mesh, 1, hflows, strategy)

    narrow = replace(LLAMA, ffn=LLAMA.ffn - 1000)  # of layers, and of the last one for responses alone
    per_place = 2 * 3 * 4096 * 1000 / 312e12 * (3 if op == "train" else 1)
    passed, read = 8 * (2048 + 1023), 8 * 1024
    found = taken(ONE) - taken(ONE, shape=narrow)
    assert found == pytest.approx(per_place * (31 * passed + read) + updates(op, plain), rel=1e-6)
    found = taken(mesh, Strategy(sp=True)) - taken(mesh, Strategy(sp=True), narrow)
    assert found == pytest.approx((per_place * 32 * passed + updates(op, plain)) / 2, rel=1e-6)


def test_of_a_dropping_adapter_the_last_mlp_runs_everywhere() -> None:
    def spares(dropout: float) -> bool:
        adapter = Adapter(16, 32.0, ADAPTER_TARGETS, dropout)
        return spares_last_mlp(replace(LLAMA, adapter=adapter), ONE, PLAIN)

    assert spares(0.0) and not spares(0.1)


def test_an_mlp_has_the_parameters_of_its_matrices() -> None:
    for shape in (shape for shape in NAMED_SHAPES.values() if not shape.moe):
        own = [p.size for p in parameters(shape) if p.layer == 0 and ".mlp." in p.name]
        assert mlp_parameters(shape) == sum(own) > 0


def updates(op: OpKind, cluster: Cluster) -> float:
    """Seconds that updates of 1000 more numbers in each layer's MLP take."""
    return 32 * 32 * 3 * 4096 * 1000 / cluster.device.memory_bandwidth if op == "train" else 0.0


def test_on_cpus_attention_takes_a_prompt_once(plain: Cluster) -> None:
    cpu = replace(plain, whole_rows=False, device=replace(plain.device, platform="cpu"))
    for prompt, response in ((1024, 64), (64, 1024)):
        run = Execution(LLAMA, "bf16", Workload(8, prompt, response, alike=8), ONE, 8, cpu)
        parts = passes(run.work, 1, 8, "lm", False, trains=False)
        tokens, seen = seen_by_rows(run, parts)
        assert tokens == 8 * (prompt + response)
        assert tokens * seen == pytest.approx(prompt**2 / 2 + 8 * response * (prompt + response / 2))
        for other in (replace(cpu, whole_rows=True), plain):
            tokens, seen = seen_by_rows(replace(run, cluster=other), parts)
            assert tokens * seen == pytest.approx(8 * (prompt + response) ** 2 / 2)


def test_calibrated_cpus_read_weights_before_and_have_least_times_of_their_own(plain: Cluster) -> None:
    shares = replace(plain.device.calibration, weights_efficiency=0.5)
    least = {"score_layer_overhead_s": 1e-3, "train_layer_overhead_s": 6e-3}
    slow = replace(plain, device=replace(plain.device, calibration=shares, **least))
    work, read = Workload(8, 1024, 1024), 2 * MATRICES / (0.5 * 2.039e12)
    before, after = (node_time_s("score", LLAMA, "bf16", work, ONE, 8, c) for c in (plain, slow))
    assert after - before == pytest.approx(read + 32e-3)
    before, after = (
        train_passes_s(Execution(LLAMA, "bf16", replace(TRAIN, kept=64), ONE, 8, c)) for c in (plain, slow)
    )
    assert after - before == pytest.approx(3 * read + 32 * 6e-3)


def test_products_in_bf16_have_a_rate_of_their_own_on_cpus(plain: Cluster) -> None:
    cpu = replace(plain.device, platform="cpu", flops=1e11)
    assert peak_flops(cpu, "bf16") == peak_flops(cpu, "f32") == 1e11
    with_amx = replace(cpu, bf16_flops=5e11)
    assert (peak_flops(with_amx, "bf16"), peak_flops(with_amx, "f32")) == (5e11, 1e11)
    for work in ("train", "score", "prefill", "decode"):
        assert rate(with_amx, work, "bf16") == 5 * rate(with_amx, work, "f32") == 5 * rate(cpu, work, "bf16")
    on_gpu = replace(plain.device, flops=1e15)
    assert (peak_flops(on_gpu, "bf16"), peak_flops(on_gpu, "f32")) == (1e15, 1e15 / 16)


def test_recomputation_repeats_the_layers_forward_pass(plain: Cluster) -> None:
    base = train_passes_s(Execution(LLAMA, "bf16", TRAIN, ONE, 1, plain))
    full = train_passes_s(Execution(LLAMA, "bf16", TRAIN, ONE, 1, plain, Strategy("full")))
    head = 2 * 32_000 * 4096 * 8 * 2048 / 312e12
    assert full - base == pytest.approx((base - 3 * head - HEAD_AGAIN) / 3)


def test_scoring_is_a_third_of_training(plain: Cluster) -> None:
    score = node_time_s("score", LLAMA, "bf16", Workload(8, 1024, 1024), ONE, 1, plain)
    train = train_passes_s(Execution(LLAMA, "bf16", TRAIN, ONE, 1, plain))
    assert 3 * score == pytest.approx(train - HEAD_AGAIN), "no logit is made again"


def test_a_pipeline_of_p_stages_takes_m_plus_p_minus_one_slots(plain: Cluster) -> None:
    one, eight = (
        train_passes_s(Execution(LLAMA, "bf16", replace(TRAIN, rows=m, rows_per_update=m), PP4, 1, plain))
        for m in (1, 8)
    )
    assert eight / one == pytest.approx((8 + 3) / (1 + 3))


@pytest.mark.parametrize(("num_layers", "pp"), [(30, 4), (94, 8), (7, 2), (61, 16), (30, 3)])
def test_the_slowest_stage_sets_the_pace(plain: Cluster, num_layers: int, pp: int) -> None:
    """That with most layers, or the last one with its head: of each the time is that of a pipeline all of
    whose stages are like it."""
    mesh, work = Mesh.of(tuple(range(pp)), pp=pp), replace(TRAIN, rows=pp, rows_per_update=pp)

    def seconds(layers: int) -> float:
        shape = replace(LLAMA, num_layers=layers)
        return train_passes_s(Execution(shape, "bf16", work, mesh, 1, plain))

    sizes = stage_sizes(num_layers, pp)
    of_layer = seconds(2 * pp) - seconds(pp)
    of_head = seconds(pp) - of_layer  # and of what it hands on
    hops = 2 * Execution(LLAMA, "bf16", work, mesh, 1, plain).hop_s(2048) * (2 * pp - 1)
    middle, last = max(sizes) * of_layer + hops, sizes[-1] * of_layer + of_head
    # The final norm counts as a part of the layers.
    assert seconds(num_layers) == pytest.approx(max(middle, last), rel=1e-5)


def test_interleaved_stages_idle_for_a_chunk_each(plain: Cluster) -> None:
    """The bubble of arXiv:2104.04473, section 2.2: (p - 1) / (v m) of the time, with v times the messages."""
    run = Execution(LLAMA, "bf16", replace(TRAIN, rows=8, rows_per_update=8), PP4, 1, plain)
    slot = train_passes_s(run) / (8 + 3)
    for vpp in (2, 4, 8):
        interleaved = train_passes_s(replace(run, strategy=Strategy(vpp=vpp)))
        hops = 2 * (vpp - 1) * run.hop_s(2048)
        assert interleaved == pytest.approx((8 + 3 / vpp) * (slot + hops))


def test_tensor_parallelism_divides_products_and_adds_all_reduces(plain: Cluster) -> None:
    mesh = Mesh.of((0, 1, 2, 3), tp=4)
    one, four = (train_passes_s(Execution(LLAMA, "bf16", TRAIN, m, 1, plain)) for m in (ONE, mesh))
    residual = 3 * 10 * 32 * 4096 * 2 * 8 * 2048 / 2.039e12  # on every rank
    ring = 2 * 3 / 4 * (8 * 2048 * 4096 * 2) / (300e9 * 0.8)
    one -= HEAD_AGAIN  # the logits of a quarter of the vocabulary are kept
    # of responses: gradients of hidden states, and four float32 sums over the vocabulary
    ends = ring + 2 * 3 / 4 * 8 * 1024 * (4096 * 2 + 4 * 4) / (300e9 * 0.8)
    assert four == pytest.approx((one - residual) / 4 + residual + 2 * 2 * 32 * ring + ends)


def test_a_scalar_head_and_the_last_of_several_stages_sum_less(plain: Cluster) -> None:
    """A scalar head is whole on each rank; embeddings are the first stage's."""
    ring, stages = 2 * 1 / 2 / (300e9 * 0.8), Mesh.of((0, 1, 2, 3), pp=2, tp=2)
    runs = [
        Execution(shape, "bf16", TRAIN, mesh, 1, plain)
        for shape, mesh in ((LLAMA.with_head("scalar"), Mesh.of((0, 1), tp=2)), (LLAMA, stages))
    ]
    scalar, last = (run.end_messages_s(2048, 1024, gradients=True) for run in runs)
    assert scalar == pytest.approx(2048 * 4096 * 2 * ring)
    assert last == pytest.approx(1024 * (4096 * 2 + 4 * 4) * ring)
    assert runs[1].end_messages_s(2048, 1024, gradients=False) == pytest.approx(1024 * 4 * 4 * ring)


def test_a_decoding_step_sums_embeddings_and_gathers_logits(plain: Cluster) -> None:
    """Of 64 rows with two bytes each: one all-reduce more than those of the layers, and three quarters of
    32,000 logits a row."""
    fast = replace(plain, device=replace(plain.device, flops=1e30, memory_bandwidth=1e30))
    mesh = Mesh.of((0, 1, 2, 3), tp=4)
    found = decode_s(Execution(LLAMA, "bf16", Workload(64, 100, 10), mesh, 64, fast))
    all_reduces, gather = (32 * 2 + 1) * 2 * 3 / 4 * 64 * 4096 * 2, 3 / 4 * 64 * 32_000 * 2
    assert found == pytest.approx(10 * (all_reduces + gather) / (300e9 * 0.8))


def test_an_update_reduces_gradients_and_streams_the_state(plain: Cluster) -> None:
    mesh = Mesh.of(tuple(range(8)), dp=8)
    adam, ring = 32 * PARAMETERS / 2.039e12, 7 / 8 * PARAMETERS / (300e9 * 0.8)
    assert update_s(LLAMA, "bf16", ONE, plain) == pytest.approx(adam)
    assert update_s(LLAMA, "bf16", mesh, plain) == pytest.approx(adam + 2 * 4 * ring)
    zero = update_s(LLAMA, "bf16", mesh, plain, Strategy(zero=1))
    assert zero == pytest.approx(adam / 8 + (4 + 2) * ring), "scatter f32 gradients, gather bf16 weights"


def test_one_row_decodes_as_fast_as_the_weights_are_read(a100: Cluster) -> None:
    bandwidth = 2.039e12 * a100.device.calibration.decode_bandwidth_efficiency
    weights, cache = 2 * MATRICES / bandwidth, (100 + 5) * 512 * 2**10 / bandwidth
    kernels = 32 * 12 * a100.device.kernel_latency_s
    tokens = decode_s(Execution(LLAMA, "bf16", Workload(1, 100, 10), ONE, 1, a100))
    assert tokens == pytest.approx(10 * (weights + cache + kernels))


def test_few_tokens_score_as_fast_as_the_weights_are_read(plain: Cluster) -> None:
    seconds = node_time_s("score", LLAMA, "bf16", Workload(1, 4, 4), ONE, 1, plain)
    assert seconds == pytest.approx(2 * MATRICES / 2.039e12, rel=1e-2)


def test_many_rows_decode_at_the_rate_of_products(plain: Cluster) -> None:
    rows = 1024  # far beyond 312e12 / 2.039e12 = 153 rows, where reading and products take as long
    tokens = decode_s(Execution(LLAMA, "bf16", Workload(rows, 0, 2), ONE, rows, plain))
    cache = rows * 512 * 2**10 / 2.039e12
    assert tokens == pytest.approx(2 * (2 * MATRICES * rows / 312e12 + cache))
    shares = Calibration(1.0, 1.0, 1.0, 1.0, decode_efficiency=0.5)
    slow = replace(plain, device=replace(plain.device, calibration=shares))
    tokens = decode_s(Execution(LLAMA, "bf16", Workload(rows, 0, 2), ONE, rows, slow))
    assert tokens == pytest.approx(2 * (2 * MATRICES * rows / 156e12 + cache))
    first = replace(shares, weights_efficiency=0.25)
    slow = replace(plain, device=replace(plain.device, calibration=first))
    tokens = decode_s(Execution(LLAMA, "bf16", Workload(rows, 0, 2), ONE, rows, slow))
    reading = 2 * MATRICES / (2.039e12 / 4)
    assert tokens == pytest.approx(2 * (reading + 2 * MATRICES * rows / 156e12 + cache))


def test_what_the_cache_does_not_hold_waits_for_the_next_wave(a100: Cluster) -> None:
    work = Workload(64, 512, 128)
    half, whole = (node_time_s("generate", LLAMA, "bf16", work, ONE, wave, a100) for wave in (32, 64))
    once = node_time_s("generate", LLAMA, "bf16", replace(work, rows=32), ONE, 32, a100)
    assert half == pytest.approx(2 * once)
    assert half > whole


def test_samples_of_a_prompt_share_its_prefill(a100: Cluster) -> None:
    work = Workload(64, 512, 128)
    shared = node_time_s("generate", LLAMA, "bf16", replace(work, samples=8), ONE, 64, a100)
    apart = node_time_s("generate", LLAMA, "bf16", work, ONE, 64, a100)
    run = Execution(LLAMA, "bf16", work, ONE, 64, a100)
    saved = prefill_s(run, 64, 512) - prefill_s(run, 8, 512)
    assert apart - shared == pytest.approx(saved)


def test_short_responses_free_rows_but_not_steps(plain: Cluster) -> None:
    """Uniform lengths: rows fall in a straight line, and below 153 of them the weights take as long to read
    as before. Keys and values are read for half the mean square of the lengths, 200^2 / 3."""
    work = Workload(512, 0, 200, responses=Lengths.of(200, 100, {}))
    run = Execution(LLAMA, "bf16", work, ONE, 512, plain)
    seconds = node_time_s("generate", LLAMA, "bf16", work, ONE, 512, plain) - prefill_s(run, 512, 0)
    knee = 312 / 2.039 / 512  # of the rows, where both take as long
    products = 2 * MATRICES / 312e12 * 512 * 200 * ((1 - knee**2) / 2 + knee**2)
    cache = 512 * (200**2 / 3 / 2) * 512 * 2**10 / 2.039e12
    assert seconds == pytest.approx(products + cache, rel=5e-3)
    few = replace(TRAIN, responses=Lengths.of(1024, 1, {}))
    trained = [train_passes_s(Execution(LLAMA, "bf16", w, ONE, 1, plain)) for w in (TRAIN, few)]
    assert trained[1] < trained[0] / 2, "fewer tokens, and shorter contexts"


def test_without_a_cache_every_token_costs_a_pass_over_all_before(plain: Cluster) -> None:
    """A forward pass over 1 to 3 tokens before each of 2 new ones: 2 on average."""
    work = Workload(4096, 1, 2)
    seconds = node_time_s("generate", LLAMA, "bf16", work, ONE, 4096, plain, Strategy(kv_cache=False))
    layers, head = MATRICES - 32_000 * 4096, 32_000 * 4096
    attention, residual = 4 * 4096 * 1 * 32 / 0.5, 10 * 32 * 4096 * 2 / 2.039e12
    token = (2 * layers + attention) / 312e12 + residual
    assert seconds == pytest.approx(2 * 4096 * (2 * token + 2 * head / 312e12))


def test_zero_3_gathers_weights_for_each_pass(plain: Cluster) -> None:
    mesh, work = Mesh.of(tuple(range(8)), dp=8), Workload(64, 1024, 1024)
    gather = 7 / 8 * 2 * PARAMETERS / (300e9 * 0.8)
    runs: tuple[tuple[OpKind, int], ...] = (("score", 1), ("train", 3))
    for op, times in runs:
        todo = replace(work, optimizer_steps=1, rows_per_update=64) if op == "train" else work
        none, all_ = (node_time_s(op, LLAMA, "bf16", todo, mesh, 4, plain, Strategy(zero=z)) for z in (0, 3))
        adam, ring = 32 * PARAMETERS / 2.039e12, 2 * 4 * 7 / 8 * PARAMETERS / (300e9 * 0.8)
        update = 7 / 8 * adam + ring if op == "train" else 0.0  # of which ZeRO-3 has nothing left
        assert all_ - none == pytest.approx(2 * times * gather - update)


def test_a_mixed_mesh_waits_for_its_slowest_devices() -> None:
    mixed = load_cluster("mixed")
    assert device_of(mixed, Mesh.of((0, 8), dp=2)).name == "A100-80G"
    assert device_of(mixed, Mesh.of((8, 9), dp=2)).name == "H100-80G"


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    return report(shipped_clusters())


@pytest.mark.parametrize(("table", "limit"), [("train", 10.0), ("generate", 4.0)])
def test_predictions_of_measurements_that_were_not_fitted(
    errors: dict[str, Any], table: str, limit: float
) -> None:
    """Mean error in percent; today 9.2 and 3.1."""
    assert errors[table]["heldout_mape"] <= limit


def test_the_papers_ppo_is_predicted_from_its_layouts(errors: dict[str, Any]) -> None:
    assert errors["ppo_small"]["mape"] <= 7, "today 6.1"
    assert errors["transition"]["mape"] <= 25, "today 23.8"


def test_latent_attention_is_priced_by_its_cached_vector() -> None:
    """Of DeepSeek-V3, by hand: a new token's attention multiplies each of 128 heads by 512 + 64 numbers of a
    cached token, and weights by 512; of whole sequences, by 192 and 128."""
    shape = NAMED_SHAPES["deepseek-v3"]
    assert latent_flops(shape, 3, 100) == 3 * 61 * 100 * 128 * 2 * (576 + 512)
    assert attention_flops(shape, 3, 100) == 3 * 61 * 100 * 128 * 2 * (192 + 128)
    assert latent_flops(NAMED_SHAPES["llama-7b"], 3, 100) == 0
