"""What the head takes while a model trains, beside what a plan counts, for a vocabulary of 16,016 tokens."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hflow
from hflow.plan import logits
from hflow.plan.cluster_file import load_cluster
from hflow.plan.read_shape import read_shape
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.cpu_kernels import library
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.logprobs import log_probs
from hflow.runtime.engines.megatron.predicted import predicted
from hflow.runtime.rows import Rows
from hflow.runtime.tools.new_model import new_model
from tests.engines.memory import peak_bytes, torch_operations, with_fast_bf16
from tests.engines.models import ADAM, make_call, make_engine, ppo_function, train_node
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, PPO

PROMPT, RESPONSE, HIDDEN = 8, 4096, 32
LETTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 16_000)))
GRAPH = """
hflow: 1
name: large_vocabulary
models: {actor: {path: FOLDER}}
loop: {name: step, times: 1}
nodes:
  examples:
    op: data
    with:
      dataset: tests/runtime/sums.jsonl
      batch: 1
      prompt: "{{ question }}"
      response: "{{ answer }}"
      max_prompt_tokens: 8
      max_response_tokens: 4096
    out: {tokens: "i32[batch, seq~]", mask: "bool[batch, resp~]"}
  train:
    op: train
    model: actor
    loss: hflow.ops.losses.negative_log_likelihood
    in: {tokens: examples.tokens}
    with: {lr: 1e-3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("large") / "model"
    new_model(folder, layers=1, hidden=HIDDEN, heads=2, ffn=64, alphabet=LETTERS, max_positions=4104)
    return str(folder)


def longest_row() -> dict[str, Rows]:
    """As long as the plan says."""
    tokens = torch.randint(3, 16_000, (PROMPT + RESPONSE,), generator=torch.Generator().manual_seed(2))
    length, numbers = torch.tensor([RESPONSE]), torch.zeros(RESPONSE)
    per_token = {name: Rows(numbers, length) for name in ("old_logprobs", "ref_logprobs", "advantages")}
    return per_token | {"tokens": Rows(tokens, length + PROMPT), "mask": Rows(numbers == 0, length)}


def peak_of_training(rank: int, new_group: NewGroup, folder: str, dtype: str) -> int:
    engine = make_engine(rank, new_group, folder, MESHES["one"], ADAM, dtype)
    loss = replace(ppo_function(), options={"entropy_coef": 0.0})  # entropy needs a second copy of logits
    call = make_call(engine, rank, train_node(1, 1, PPO | {"entropy_coef": 0.1}, loss), 1, 1)
    data = longest_row()
    with torch_operations():
        engine.run(call, data)
        return peak_bytes(lambda: engine.run(call, data))


@pytest.mark.rotating(6)
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("bf16", 2)])
def test_a_row_whose_logits_would_not_fit_trains_in_what_the_plan_says(
    pool: Pool, folder: str, tmp_path: Path, dtype: str, size: int
) -> None:
    """In a device that the logits of the only row, and their gradient, would overflow."""
    file, local = tmp_path / "graph.yaml", load_cluster("local")
    file.write_text(GRAPH.replace("FOLDER", f"{folder}, dtype: {dtype}"))
    device = replace(local.device, memory_bytes=250_000_000)
    plan = hflow.compile(hflow.load(file), replace(local, devices_per_host=1, device=device))
    (memory,) = plan.memory
    all_logits = 2 * RESPONSE * read_shape(folder).vocab * size
    assert memory.peak_bytes <= memory.capacity_bytes < all_logits
    predicted_bytes = next(n for n in plan.nodes if n.node == "train").memory_bytes
    (measured,) = pool.run(1, peak_of_training, folder, dtype)
    assert measured == pytest.approx(predicted_bytes, rel=0.1)


def peak_of_head(rank: int, new_group: NewGroup, vocab: int, hidden: int, dtype: str, kept: int) -> int:
    """Of a forward and a backward pass of 256 tokens, by tiles of 64."""
    group = new_group((0,))
    assert dist.get_world_size(group) == 1
    exact = torch.float32 if dtype == "f32" else torch.bfloat16
    states = torch.randn(256, hidden, dtype=exact).requires_grad_()
    weight: Any = torch.randn(vocab, hidden, dtype=exact).requires_grad_()
    weight.main_grad = torch.zeros(vocab, hidden)
    targets, nothing = torch.randint(vocab, (256,)), _nothing()
    sets = torch.cat([targets[:, None], torch.randint(vocab, (256, kept - 1))], 1) if kept else None

    def passes() -> None:
        log_p, entropy = predicted(states, OutputMatrix(nothing, weight, group), targets, kept=sets)
        (log_p.sum() + entropy.sum()).backward()
        states.grad = None

    with patch.object(logits, "LOGITS_BYTES", 8 * 64**2):
        passes()
        return peak_bytes(passes)


def _nothing() -> Any:
    return None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kept", [0, 4])
def test_the_head_takes_memory_by_the_hidden_size_and_not_by_the_vocabulary(
    pool: Pool, dtype: str, kept: int
) -> None:
    def peak(vocab: int, hidden: int) -> int:
        return pool.run(1, peak_of_head, vocab, hidden, dtype, kept)[0]

    small, double, wide = peak(2048, 256), peak(4096, 256), peak(2048, 512)
    logits_more = 256 * 2048 * (4 if dtype == "f32" else 2)
    per_part = 256 * 8 * 4 * 2048 // 64  # some numbers of each token for every 64 words
    assert double - small <= per_part < logits_more
    hidden_more = 256 * 256 * (4 if dtype == "f32" else 6)  # the gradient, and in bf16 its sum in float32
    assert wide - small == pytest.approx(hidden_more, rel=0.1)


def copies_of_logits(rank: int, new_group: NewGroup, dtype: str, kernels: bool) -> tuple[float, float]:
    """The most that both passes hold: of logits that are given, in copies of these; of those that are made by
    tiles, in tiles."""
    exact, side, group = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype], 512, new_group((0,))
    given = torch.randn(side, 2048, dtype=exact).requires_grad_()
    hidden = torch.randn(side, 8, dtype=exact).requires_grad_()
    weight: Any = torch.randn(2048, 8, dtype=exact).requires_grad_()
    weight.main_grad, targets = torch.zeros(2048, 8), torch.randint(2048, (side,))

    def from_logits() -> None:
        log_p, entropy = log_probs(given, targets, group)
        (log_p.sum() + entropy.sum()).backward()
        given.grad = None

    def from_hidden() -> None:
        log_p, entropy = predicted(hidden, OutputMatrix(_nothing(), weight, group), targets)
        (log_p.sum() + entropy.sum()).backward()
        hidden.grad = None

    def peak(passes: Any) -> int:
        passes()  # once before, for what is made once
        return peak_bytes(passes)

    operations = contextlib.nullcontext() if kernels else torch_operations()
    few_logits = patch.object(logits, "LOGITS_BYTES", logits.COPIES_BYTES * side**2)
    with operations, few_logits, with_fast_bf16(True):
        tile_bytes = side**2 * exact.itemsize
        return peak(from_logits) / given.nbytes, peak(from_hidden) / tile_bytes


@pytest.mark.skipif(not library.compilers(), reason="there is no C++ compiler")
@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("bf16", 2)])
def test_kernels_make_no_float32_copies(pool: Pool, dtype: str, size: int) -> None:
    (by_torch,), (by_kernels,) = (pool.run(1, copies_of_logits, dtype, kernels) for kernels in (False, True))
    copies = logits.COPIES_BYTES / size
    # the gradient; of each token some numbers, where it has 2,048 logits
    assert by_torch[0] == pytest.approx(copies + 1, rel=0.03)
    assert by_kernels[0] == pytest.approx(1, rel=0.03)
    # in place of the tile; in bf16 torch's products copy a matrix that they read by columns
    assert by_torch[1] == pytest.approx(copies, rel=0.1)
    assert by_kernels[1] < (1.1 if dtype == "f32" else 2.6)
