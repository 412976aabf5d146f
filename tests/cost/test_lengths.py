"""Prices of rows of different lengths: against closed forms, simulated batches and the engine's packing."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import pytest
import torch

import hflow
from hflow.cost.compute import node_time_s
from hflow.cost.passes import passes
from hflow.cost.rows_in_flight import rows_in_flight
from hflow.graph.ir import OpKind
from hflow.graph.lengths import Lengths
from hflow.plan.cluster_file import load_cluster
from hflow.plan.engine_registry import GenerationEngine
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.packing import TokenBudget
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload, workload
from hflow.runtime.engines.megatron.balance import balanced
from hflow.runtime.engines.megatron.micro_batches import micro_batches
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.rows import from_lists

SHAPE = NAMED_SHAPES["llama-7b"]
MESHES = [Mesh.of((0,)), Mesh.of((0, 1, 2, 3), dp=4), Mesh.of((0, 1, 2, 3), pp=2, tp=2)]
LONG_TAIL = Lengths.of(4096, 1019, {})
SHORT_TAIL = Lengths.of(512, None, {"p0": 100, "p50": 300, "p95": 400})
Tokens = npt.NDArray[np.int64]


@pytest.mark.parametrize(
    ("op", "engine", "mesh"),
    [
        *((op, "megatron", mesh) for op in ("score", "train") for mesh in MESHES),
        *(("generate", engine, mesh) for engine in ("megatron", "sglang") for mesh in MESHES[:2]),
    ],
    ids=str,
)
def test_rows_that_are_all_the_greatest_cost_what_they_do_unsaid(
    op: OpKind, engine: GenerationEngine, mesh: Mesh
) -> None:
    work = Workload(256, 96, 160, 4, alike=4)
    if op == "train":
        work = replace(work, optimizer_steps=2, rows_per_update=128)
    stated = replace(work, prompts=Lengths(96, 96), responses=Lengths(160, 160))
    for micro in (8, 32):
        unsaid, said = (
            node_time_s(op, SHAPE, "bf16", w, mesh, micro, load_cluster("a100x8"), Strategy(engine=engine))
            for w in (work, stated)
        )
        assert said == pytest.approx(unsaid, rel=1e-9)


def drawn(lengths: Lengths, shape: tuple[int, ...], seed: int) -> Tokens:
    """Whole lengths, by inverting the survival function as a table."""
    at = np.arange(lengths.greatest + 1)
    ended = 1 - np.array([lengths.survival(float(t)) for t in at])
    return np.maximum(1, np.searchsorted(ended, np.random.default_rng(seed).random(shape)))


def steps_of(lengths: list[int], most: int, refills: bool) -> tuple[int, int]:
    """Steps until the last row has ended, and the rows in all of them; rows begin in this order."""
    if not refills:
        waves = [lengths[first : first + most] for first in range(0, len(lengths), most)]
        return sum(max(wave) for wave in waves), sum(lengths)
    ends: list[int] = []
    for length in lengths:
        start = heappop(ends) if len(ends) == most else 0
        heappush(ends, start + length)
    return max(ends), sum(lengths)


@pytest.mark.parametrize("refills", [True, False])
@pytest.mark.parametrize("lengths", [LONG_TAIL, SHORT_TAIL], ids=["long tail", "short tail"])
@pytest.mark.parametrize(("rows", "most"), [(128, 128), (300, 64), (64, 24), (2000, 16)])
@pytest.mark.parametrize("replicas", [1, 8])
def test_steps_and_rows_agree_with_simulated_batches(
    lengths: Lengths, rows: int, most: int, refills: bool, replicas: int
) -> None:
    """The replica that takes longest, on average over many draws. A step costs as much as `fixed` rows; that
    one replica has more tokens than another counts little beside it, and is left out."""
    runs = max(20, 60_000 // (rows * replicas))
    found = drawn(lengths, (runs, replicas, rows), seed=rows)
    parts = rows_in_flight(lengths, rows, most, refills, replicas)
    for fixed in (0, 50) if replicas == 1 else (50, 500):
        slowest = [
            max(fixed * steps + all_rows for steps, all_rows in (steps_of(own, most, refills) for own in run))
            for run in found.tolist()
        ]
        predicted = sum(part.steps * (fixed + part.rows) for part in parts)
        assert predicted == pytest.approx(np.mean(slowest), rel=0.04)


def test_replicas_that_share_experts_wait_in_each_wave() -> None:
    found = drawn(LONG_TAIL, (200, 4, 96), 0).reshape(200, 4, 3, 32)
    parts = rows_in_flight(LONG_TAIL, 96, 32, refills=False, replicas=4, in_step=4)
    assert sum(part.steps for part in parts) == pytest.approx(found.max((1, 3)).sum(1).mean(), rel=0.02)


def test_the_tokens_before_a_step_are_those_that_rows_have_by_then() -> None:
    """Of row t of a response t tokens are there: over all steps, half the mean square."""
    for refills, rows, most in ((True, 500, 50), (False, 100, 100)):
        parts = rows_in_flight(LONG_TAIL, rows, most, refills)
        seen = sum(part.steps * part.rows * part.tokens for part in parts)
        assert seen == pytest.approx(rows * LONG_TAIL.mean_square / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("prompts", "samples", "micro"), [(16, 8, 4), (64, 1, 8), (8, 16, 2), (128, 16, 32), (64, 16, 512)]
)
def test_micro_batches_are_those_that_the_engine_makes(prompts: int, samples: int, micro: int) -> None:
    """Their number, the tokens in all of them, and in the largest."""
    lengths, prompt = Lengths.of(512, 128, {}), 100
    work = Workload(prompts * samples, prompt, 512, responses=lengths, alike=samples)
    counts: list[int] = []
    totals: list[int] = []
    largest: list[int] = []
    for seed in range(8):
        responses = drawn(lengths, (prompts * samples,), seed).tolist()
        tokens = [[row // samples] * prompt + [1] * n for row, n in enumerate(responses)]
        mask = from_lists([[True] * n for n in responses])
        sequences = Sequences.of(from_lists(tokens), mask, torch.device("cpu"))
        budget = TokenBudget.of(work, micro, "lm")
        made = micro_batches(sequences, torch.arange(len(responses)), budget, same_shape=False)
        counts.append(len(made))
        totals.append(sum(len(one.pack.tokens) for one in made))
        largest.append(max(len(one.pack.tokens) for one in made))
    packed, padded = (
        passes(work, 1, micro, "lm", with_padding, trains=False) for with_padding in (False, True)
    )
    assert packed.count == padded.count == pytest.approx(np.mean(counts), rel=0.12)
    assert packed.count * packed.tokens == pytest.approx(np.mean(totals), rel=0.05)
    assert padded.tokens == pytest.approx(np.mean(largest), rel=0.15)


@pytest.mark.parametrize("minibatches", [1, 2, 3, 8])
@pytest.mark.parametrize(("samples", "micro"), [(8, 8), (8, 16), (6, 4), (6, 1), (4, 7)])
def test_tokens_of_equal_rows_are_those_that_the_engine_packs(
    samples: int, micro: int, minibatches: int
) -> None:
    """Rows of an update are every so many of all, in micro-batches; each prompt is of its own tokens."""
    rows, prompt, response = 24 * samples, 20, 9
    work = Workload(rows, prompt, response, 1, minibatches, rows // minibatches, alike=samples)
    tokens = from_lists([[row // samples] * prompt + [1] * response for row in range(rows)])
    sequences = Sequences.of(tokens, from_lists([[True] * response] * rows), torch.device("cpu"))
    budget = TokenBudget.of(work, micro, "lm")
    made = [
        one
        for part in range(minibatches)
        for one in micro_batches(sequences, torch.arange(part, rows, minibatches), budget, same_shape=False)
    ]
    found = passes(work, 1, micro, "lm", padded=False, trains=True)
    assert minibatches * found.count == len(made)
    if rows // minibatches % micro == 0:  # else the last one is counted as a full one
        total = sum(len(one.pack.tokens) for one in made)
        assert minibatches * found.count * found.tokens == pytest.approx(total, rel=0.03)
    whole = passes(work, 1, micro, "lm", padded=False, trains=True, whole_rows=True)
    assert whole.tokens == micro * (prompt + response) and whole.prompts == micro


@pytest.mark.parametrize(
    ("algorithm", "nodes"),
    [
        ("grpo", {"ref_logprobs": (8, 8), "actor_train": (8, 4)}),  # two minibatches, which take rows in turn
        ("tool_grpo", {"ref_logprobs": (8, 8), "turn_3": (8, 8)}),
        ("dpo", {"actor_train": (2, 2)}),  # a loss over pairs, which stay together
        ("ppo", {"values": (1, 1), "actor_train": (1, 1)}),
    ],
)
def test_rows_of_one_prompt_are_read_from_types(algorithm: str, nodes: dict[str, tuple[int, int]]) -> None:
    graph = hflow.load(algorithm, ["params.minibatch=512"] if algorithm == "grpo" else [])
    works = {name: workload(graph.node(name)) for name in nodes}
    assert {name: (work.alike, work.alike_in_update) for name, work in works.items()} == nodes


def test_replicas_wait_for_the_one_with_the_most_tokens() -> None:
    lengths, replicas, rows = Lengths.of(512, 128, {}), 16, 512
    work = Workload(rows, 24, 512, 1, 1, rows, responses=lengths)
    found = 24 + drawn(lengths, (200, replicas, rows // replicas), 0)
    fullest = found.sum(2).max(1).mean()
    scored = passes(work, replicas, 4, "lm", False, trains=False)
    assert scored.count * scored.tokens == pytest.approx(rows / replicas * (work.mean_sequence - 1))
    alone = passes(replace(work, rows=rows // replicas), 1, 4, "lm", False, trains=False)
    assert scored.count / alone.count == pytest.approx(fullest / (rows / replicas * 152), rel=0.05)
    owners = [row * replicas // rows for row in range(rows)]
    moved: list[float] = []
    for run in found[:20].reshape(20, -1).tolist():
        loads = np.bincount(balanced(run, owners, replicas), weights=run)
        moved.append(loads.max() / loads.mean())
    assert np.mean(moved) == pytest.approx(1.05, abs=0.02)


def test_memory_is_that_of_the_greatest_lengths() -> None:
    from hflow.cost.working_memory import working_bytes

    work = Workload(64, 96, 160)
    stated = replace(work, responses=Lengths.of(160, 20, {}))
    for op in ("generate", "score"):
        assert working_bytes(op, SHAPE, "bf16", work, MESHES[0], 8) == working_bytes(
            op, SHAPE, "bf16", stated, MESHES[0], 8
        )
