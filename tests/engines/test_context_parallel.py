"""Rows cut over context- and sequence-parallel ranks, as by PyTorch and transformers, which cut nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hflow.cost.context import predicted_tokens
from hflow.plan.layout import Mesh
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.attention import attend_last, attend_within
from hflow.runtime.engines.megatron.context_shard import ContextShard
from hflow.runtime.engines.megatron.pack import Pack
from hflow.runtime.rows import Rows
from tests.engines.memory import peak_bytes
from tests.engines.models import ADAM, Folders, load_hf, make_call, make_engine, score_node, share
from tests.engines.processes import Pool
from tests.engines.test_generate import as_lists
from tests.engines.test_pack import ROW, sequences_of
from tests.engines.test_scalar_head import judge_on_rank
from tests.engines.test_strategies import BOTH, RECOMPUTE, ZERO, train_on_rank
from tests.engines.test_train import PPO, ROWS, compare, reference, response_log_probs, rollout

MESHES = {
    "tp2": Mesh.of((0, 1), tp=2),
    "tp2pp2": Mesh.of((0, 1, 2, 3), pp=2, tp=2),
    "cp2": Mesh.of((0, 1), cp=2),
    "cp4": Mesh.of((0, 1, 2, 3), cp=4),
    "dp2cp2": Mesh.of((0, 1, 2, 3), dp=2, cp=2),
    "tp2cp2": Mesh.of((0, 1, 2, 3), cp=2, tp=2),
    "pp2cp2": Mesh.of((0, 1, 2, 3), pp=2, cp=2),
}
SP = Strategy(sp=True)
RUNS = {
    "cp2": ("cp2", PLAIN),
    "cp4 recompute": ("cp4", RECOMPUTE),
    "dp2cp2": ("dp2cp2", PLAIN),
    "tp2cp2": ("tp2cp2", PLAIN),
    "pp2cp2": ("pp2cp2", PLAIN),
    "tp2 sp": ("tp2", SP),
    "tp2pp2 sp": ("tp2pp2", SP),
    "tp2cp2 sp recompute": ("tp2cp2", replace(SP, recompute="full")),
}


@dataclass(frozen=True)
class Member:
    """Of a group that exchanges nothing."""

    index: int
    ranks: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.ranks


def shards(rows: list[tuple[list[int], list[int]]], ranks: int) -> list[ContextShard]:
    members: list[Any] = [Member(index, ranks) for index in range(ranks)]
    return [ContextShard.of(sequences_of(rows), member) for member in members]


@settings(deadline=None, max_examples=40)
@given(st.lists(ROW, min_size=1, max_size=8), st.integers(2, 4), st.integers(0, 3))
def test_every_token_is_run_once_and_sees_its_row(
    rows: list[tuple[list[int], list[int]]], ranks: int, padding: int
) -> None:
    pack, found = Pack.of(sequences_of(rows)), shards(rows, ranks)
    width = len(found[0].tokens) + padding
    found = [shard.padded(width) for shard in found]
    gathered, positions = (torch.cat([getattr(s, name) for s in found]) for name in ("tokens", "positions"))
    inputs = [prompt + response[:-1] for prompt, response in rows]
    run = 0
    for rank, shard in enumerate(found):
        for row in shard.rows:
            seen = gathered[row.keys].tolist()
            assert any(seen == tokens[: len(seen)] for tokens in inputs)
            assert positions[row.keys].tolist() == list(range(len(seen)))
            for own in row.queries:  # the last tokens before `end` are the rank's own places
                at = row.keys[own.end - (own.stop - own.start) : own.end]
                assert at.tolist() == list(range(rank * width + own.start, rank * width + own.stop))
                run += own.stop - own.start
    assert run == (len(pack.tokens) if any(inputs) else 0)
    predicting = torch.cat([s.predicts for s in found])
    assert sorted(predicting.tolist()) == list(range(len(pack.predicted_at)))
    for shard in found:
        mine = shard.tokens[shard.predicted_at]
        assert mine.tolist() == shard.own(pack.tokens[pack.predicted_at]).tolist()


def test_ranks_share_the_scores_of_long_rows() -> None:
    """Of one long row, and of rows that share a long prompt."""
    prompt = [3] * 4000
    for rows in ([(prompt, [4] * 4001)], [(prompt, [4] * 2001), (prompt, [5] * 1601)]):
        queries = [[own for row in shard.rows for own in row.queries] for shard in shards(rows, 4)]
        scores = [
            sum((own.end - (own.stop - own.start) / 2) * (own.stop - own.start) for own in each)
            for each in queries
        ]
        assert max(scores) < 1.001 * min(scores)


@pytest.mark.parametrize(("prompt", "response"), [(900, 100), (500, 500), (200, 800), (10, 990)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_predicts_more_than_is_planned(prompt: int, response: int, ranks: int) -> None:
    found = [len(shard.predicts) for shard in shards([([3] * prompt, [4] * response)], ranks)]
    planned = predicted_tokens(prompt + response, response, Mesh.of(tuple(range(ranks)), cp=ranks))
    assert sum(found) == response
    assert max(found) <= planned + 2  # parts of a row differ by a token


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("queries", [1, 700, 1300])
def test_the_last_queries_see_what_is_before_them(queries: int, window: int | None) -> None:
    """Longer than a turn, with gradients, against attention with a mask of all scores."""
    torch.manual_seed(0)
    length, heads = 1300, 2
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask &= ~mask.tril(-(window or length))
    q, k, v = (torch.randn(1, n, length, 8, requires_grad=True) for n in (2 * heads, heads, heads))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[:, :, -queries:]
    last = q[:, :, -queries:]
    found = attend_last(last, k, v) if window is None else attend_within(window, last, k, v)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # float32 sums of 1300 terms of order 1
    slope = torch.randn_like(found)
    for mine, theirs in zip(*(torch.autograd.grad(x, (q, k, v), slope) for x in (found, expected))):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


def test_memory_of_attention_grows_with_the_length() -> None:
    """Of the last half of a row, with gradients; kept masks or scores would grow with its square."""
    peaks: list[int] = []
    for length in (1024, 2048, 4096):
        q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))

        def both_passes(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            attend_last(q[:, :, q.shape[2] // 2 :], k, v).sum().backward()

        peaks.append(peak_bytes(both_passes))
    assert all(longer < 2.2 * shorter for shorter, longer in pairwise(peaks))


@pytest.mark.matrix(24)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("variant", "tied"),
    [
        ("llama", True),
        ("mistral", False),
        ("qwen2", False),
        ("qwen3 windows", True),
        ("gemma2", True),
        ("gemma3", True),
    ],
)
def test_gradients_equal_plain_pytorch(
    pool: Pool, folders: Folders, run: str, variant: str, tied: bool
) -> None:
    """Prompts that rows share, rows without response and rows shorter than there are ranks among them."""
    layout, strategy = RUNS[run]
    folder, mesh = folders.of(variant, tied), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    metrics, named = reference(folder, rollout(folder), options, 1, 1)
    arguments = folder, mesh, rollout(folder), options, 1, strategy
    results = pool.run(len(mesh.devices), train_on_rank, *arguments)
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare([found[:2] for found in results], metrics, named, atol=1e-6)
    assert sum("kl" in reported for reported, *_ in results) == mesh.dp, "one rank of each replica reports"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout,strategy", [("cp2", ZERO), ("dp2cp2", BOTH), ("tp2cp2", replace(ZERO, sp=True))]
)
def test_updates_equal_torch_adamw(pool: Pool, folders: Folders, layout: str, strategy: Strategy) -> None:
    """Four updates with clipping and weight decay; ZeRO-1 splits the optimizer over dp and cp."""
    folder, mesh = folders.of("qwen3", False), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "token_mean", "clip_grad": 0.7, "weight_decay": 0.5}
    metrics, named = reference(folder, rollout(folder), options, 2, 2)
    arguments = folder, mesh, rollout(folder), options, 2, strategy
    results = pool.run(len(mesh.devices), train_on_rank, *arguments)
    weights = {name: (weight, weight) for name, (_, weight) in named.items()}
    parts = [
        (reported, {name: (box, weight, weight) for name, (box, _, weight) in found.items()})
        for reported, found, _ in results
    ]
    # Adam divides by the root of a running mean: rounding of small gradients grows over four updates
    compare(parts, metrics, weights, atol=1e-5)


def score_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows], strategy: Strategy
) -> Any:
    engine = make_engine(rank, new_group, folder, mesh, frozen=True, strategy=strategy)
    call = make_call(engine, rank, score_node(ROWS, 0.8), ROWS, 2, strategy=strategy)
    inputs = {name: data[name].slice(*share(mesh, rank, ROWS)) for name in ("tokens", "mask")}
    outputs = engine.run(call, inputs).outputs
    return {name: as_lists(rows) for name, rows in outputs.items()}


def log_probs_are_those_of_transformers(pool: Pool, folder: str, mesh: Mesh, strategy: Strategy) -> None:
    """Of a score node, with entropies; on all ranks of a replica that have the head."""
    data, model = rollout(folder), load_hf(folder)
    results = pool.run(len(mesh.devices), score_on_rank, folder, mesh, data, strategy)
    found: dict[int, Any] = {}
    for rank, outputs in enumerate(results):
        at = mesh.coordinates(rank)
        assert (not outputs) == (at["pp"] < mesh.pp - 1)
        assert not outputs or found.setdefault(at["dp"], outputs) == outputs, "ranks of a replica agree"
    for index, name in enumerate(("logprobs", "entropy")):
        rows = [row for replica in sorted(found) for row in found[replica][name]]
        for row, mine in zip(range(ROWS), rows, strict=True):
            tokens = data["tokens"].slice(row, row + 1).values.long()
            with torch.no_grad():
                expected = response_log_probs(model, tokens, len(mine), 0.8)[index]
            assert mine == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.matrix(cover=False)
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3 windows", "gemma2", "gemma3"])
@pytest.mark.parametrize("run", [run for run in RUNS if "recompute" not in run])
def test_log_probs_equal_transformers(pool: Pool, folders: Folders, run: str, variant: str) -> None:
    layout, strategy = RUNS[run]
    log_probs_are_those_of_transformers(pool, folders.of(variant, False), MESHES[layout], strategy)


@pytest.mark.parametrize("run", ["cp2", "tp2cp2 sp recompute"])
def test_values_and_scores_are_those_of_whole_rows(pool: Pool, folders: Folders, run: str) -> None:
    layout, strategy = RUNS[run]
    folder, mesh = folders.of("qwen3", False, "scalar"), MESHES[layout]
    data = rollout(folders.of("llama", False))
    (whole,) = pool.run(1, judge_on_rank, folder, Mesh.of((0,)), data, 14)
    for values, scores in pool.run(len(mesh.devices), judge_on_rank, folder, mesh, data, 4, strategy):
        for mine, theirs in zip([*values, scores], [*whole[0], whole[1]], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)  # float32 sums of some hundred terms of order 1
