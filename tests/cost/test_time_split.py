"""What a node's time is spent on: the parts add up, and each is what closed forms say; MFU as Megatron's."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

import hflow
from hflow.cost.execution import Execution
from hflow.cost.time_split import model_flops, peak_of_mesh, time_split, tokens
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.plan import Plan
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload, rounds
from hflow.view.terminal.efficiency import EFFICIENCY_COLUMNS, efficiency_text, execution

LAYERS, HIDDEN, VOCABULARY, ROWS, SEQUENCE = 8, 1536, 32_000, 32, 2048
# As wide as in Megatron-LM's formula, in which a layer has 12 h^2 parameters.
SHAPE = ModelShape(
    "llama", LAYERS, HIDDEN, 12, num_kv_heads=12, head_dim=128, ffn=8 * HIDDEN // 3, vocab=VOCABULARY,
    max_positions=4096, rope_theta=1e4, norm_eps=1e-5, tied=False, qkv_bias=False,
)  # fmt: skip
WORK = Workload(ROWS, SEQUENCE // 2, SEQUENCE // 2, 1, 2, ROWS)
LINK_SHARE = 0.8  # docs/plans.md: what collectives reach of a CUDA link's bandwidth


def run_on(mesh: Mesh, work: Workload = WORK, micro_batch: int = 1, **strategy: str | int) -> Execution:
    return Execution(
        SHAPE, "bf16", work, mesh, micro_batch, load_cluster("h100x8"), replace(Strategy(), **strategy)
    )


def mesh_of(**sizes: int) -> Mesh:
    count = 1
    for size in sizes.values():
        count *= size
    return Mesh.of(tuple(range(count)), **sizes)


def test_mfu_counts_what_megatron_counts() -> None:
    """72 B s l h^2 (1 + s/6h + V/12lh), arXiv:2104.04473 without recomputation, of whose attention a causal
    model needs a half, and of whose logits, in the last term, those of responses, a half too; two updates."""
    run = run_on(mesh_of())
    expected = 72 * ROWS * SEQUENCE * LAYERS * HIDDEN**2
    expected *= 1 + SEQUENCE / (12 * HIDDEN) + VOCABULARY / (2 * 12 * LAYERS * HIDDEN)
    assert model_flops("train", run) == pytest.approx(2 * expected, rel=1e-3)  # norms are hardly anything
    assert model_flops("score", run) == pytest.approx(expected / 3, rel=1e-3)
    assert model_flops("train", run_on(mesh_of(), recompute="full")) == model_flops("train", run)
    shared = run_on(mesh_of(), share_forward=True)  # of the first of two updates
    assert model_flops("train", shared) == pytest.approx(5 / 6 * model_flops("train", run))
    assert (tokens("train", run), tokens("score", run)) == (2 * ROWS * SEQUENCE, ROWS * SEQUENCE)
    assert tokens("generate", run) == ROWS * SEQUENCE / 2
    assert peak_of_mesh(run_on(mesh_of(dp=4))) == 4 * 989e12


def test_mfu_counts_a_prompt_once_for_its_samples() -> None:
    """Summed token by token: of a group of eight the prompt, and eight responses that see it. In two updates
    each has four of them, and the prompt."""
    layers, head = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * SHAPE.ffn), VOCABULARY * HIDDEN
    half = SEQUENCE // 2

    def flops(places: range, of_each: int) -> float:
        return sum(2 * of_each + 4 * LAYERS * HIDDEN * (place + 0.5) for place in places)

    prompt, response = flops(range(half), layers), flops(range(half, SEQUENCE), layers + head)
    run = run_on(mesh_of(), Workload(ROWS, half, half, alike=8))
    assert model_flops("score", run) == pytest.approx(ROWS / 8 * prompt + ROWS * response, rel=1e-3)
    updates = run_on(mesh_of(), Workload(ROWS, half, half, 1, 2, ROWS // 2, alike=8))
    expected = 2 * ROWS / 8 * prompt + ROWS * response
    assert model_flops("train", updates) == pytest.approx(3 * expected, rel=1e-3)


def test_generation_counts_each_token_once() -> None:
    """All of a row's tokens pass through the layers, and the head is asked for each new one and for the
    first: summed here token by token."""
    run = run_on(mesh_of())
    layers, head = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * SHAPE.ffn), VOCABULARY * HIDDEN
    places = range(SEQUENCE)
    flops = sum(2 * layers + 4 * LAYERS * HIDDEN * (place + 0.5) for place in places)
    flops += 2 * head * (SEQUENCE // 2 + 1)
    assert model_flops("generate", run) == pytest.approx(ROWS * flops, rel=1e-3)


@pytest.mark.parametrize("op", ["train", "score", "generate"])
def test_one_device_neither_communicates_nor_waits(op: str) -> None:
    split = time_split(op, run_on(mesh_of()))  # type: ignore[arg-type]
    assert split.communication_s == split.bubble_s == 0
    assert min(split.compute_s, split.memory_s, split.latency_s) > 0
    assert (op == "generate") == (split.memory_s > split.compute_s)


def test_tensor_parallel_scores_wait_for_two_all_reduces_a_layer() -> None:
    """Besides one of embeddings, and two of a response's log-probs: one and three float32 numbers each."""
    run = run_on(mesh_of(tp=2))
    link = run.cluster.intra_host
    size = 2 * (SEQUENCE - 1) * HIDDEN

    def summed_s(size: float) -> float:
        return size / (LINK_SHARE * link.bandwidth) + 2 * link.latency_s  # two ranks: 2(n-1)/n = 1

    ends_s = summed_s(size) + summed_s(SEQUENCE / 2 * 4) + summed_s(SEQUENCE / 2 * 12)
    split = time_split("score", run)
    assert split.communication_s == pytest.approx(ROWS * (LAYERS * 2 * summed_s(size) + ends_s))


@pytest.mark.parametrize(("stages", "micro_batch"), [(2, 1), (4, 2), (8, 8)])
def test_the_bubble_of_a_pipeline_is_that_of_its_slots(stages: int, micro_batch: int) -> None:
    """(p - 1) / (m + p - 1) of the passes; of training, the update is none of them."""
    run = run_on(mesh_of(pp=stages), micro_batch=micro_batch)
    share = (stages - 1) / (ROWS / micro_batch + stages - 1)
    score, train = time_split("score", run), time_split("train", run)
    assert score.bubble_s / score.total_s == pytest.approx(share)
    assert 0.9 * share < train.bubble_s / train.total_s < share
    assert time_split("generate", run).bubble_s == 0


def test_kernels_are_waited_for_in_every_layer() -> None:
    """Twelve of each layer's forward pass, in each slot."""
    run = run_on(mesh_of())
    split = time_split("score", run)
    assert split.latency_s == pytest.approx(ROWS * LAYERS * 12 * run.cluster.device.kernel_latency_s)


def plans() -> list[Plan]:
    """Of algorithms with regions, lags, shared bases and scalar heads, in layouts of all kinds."""
    shape, reward = "params.model=shape:qwen2.5-0.5b", "params.reward_model=shape:qwen2.5-0.5b"
    made = [("ppo", (shape, reward), ()), ("dapo", (shape,), ()), ("async_grpo", (shape,), ())]
    made += [("ppo", (shape, reward), ("actor_train=pp2,tp2,dp2", "rollout=tp2,dp4"))]
    return [hflow.compile(hflow.load(Path(f"algorithms/{n}.yaml"), o), "h100x8", p) for n, o, p in made]


def test_the_parts_are_the_time_of_every_node_of_a_plan() -> None:
    for plan in plans():
        for own in (node for node in plan.nodes if node.model):
            node = plan.graph.node(own.node)
            split = time_split(node.op, execution(plan, own))
            times = rounds(plan.graph, node)
            assert times * split.total_s == pytest.approx(own.time_s, rel=1e-9), (plan.graph.name, own.node)
            parts = [getattr(split, field.name) for field in fields(split)]
            assert min(parts) >= -1e-12 * split.total_s, (plan.graph.name, own.node, split)


def test_the_table_has_a_line_for_every_node_with_a_model() -> None:
    plan = plans()[0]
    header, *lines = efficiency_text(plan).splitlines()
    assert header.split("  ")[0] == EFFICIENCY_COLUMNS[0][0]
    assert [line.split()[0] for line in lines] == [node.node for node in plan.nodes if node.model]
    for line in lines:
        *_, compute, memory, communication, latency, bubble = line.split()
        assert (
            abs(sum(int(part[:-1]) for part in (compute, memory, communication, latency, bubble)) - 100) < 4
        )
