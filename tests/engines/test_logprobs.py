"""Log-probs and entropy over a split vocabulary against torch's own log_softmax and its gradient."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron import logprobs
from tests.engines.memory import torch_operations
from tests.engines.processes import Pool

TOKENS, VOCAB, TEMPERATURE = 23, 12, 0.6


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = 5 * torch.randn(TOKENS, VOCAB)
    logits[3] += 1e4  # exp overflows unless the maximum is taken out first
    return logits, torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS), torch.randn(TOKENS)


def on_rank(
    rank: int, new_group: NewGroup, chunk_bytes: int | None, entropy: bool, count: int = TOKENS
) -> Any:
    """Values, and this rank's part of the gradient of their weighted sum. Without `chunk_bytes` kernels make
    them, which have no chunks."""
    world = dist.get_world_size()
    group = new_group(tuple(range(world)))
    logits, targets, a, b = (t[:count] for t in data())
    part = logits.chunk(world, -1)[rank].clone().requires_grad_()
    operations = contextlib.nullcontext() if chunk_bytes is None else torch_operations()
    with operations, patch.object(logprobs, "CHUNK_BYTES", chunk_bytes or logprobs.CHUNK_BYTES):
        assert chunk_bytes is None or not logprobs.kernels(part)
        log_p, uncertainty = logprobs.log_probs(part, targets, group, TEMPERATURE, entropy)
        (log_p @ a + (uncertainty @ b if entropy else 0)).backward()
    assert torch.equal(part.detach(), logits.chunk(world, -1)[rank]), "logits are read only"
    assert part.grad is not None
    return log_p.detach().numpy(), uncertainty.detach().numpy(), part.grad.numpy()


@pytest.mark.matrix
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("chunk_bytes", [None, 1, 100, 2**20])
@pytest.mark.parametrize("entropy", [True, False])
def test_values_and_gradients(pool: Pool, world: int, chunk_bytes: int | None, entropy: bool) -> None:
    logits, targets, a, b = data()
    z = logits.double().requires_grad_()
    log_p = (z / TEMPERATURE).log_softmax(-1)
    chosen = log_p.gather(1, targets[:, None]).squeeze(1)
    uncertainty = -(log_p.exp() * log_p).sum(-1)
    (chosen @ a.double() + (uncertainty @ b.double() if entropy else 0)).backward()
    results = pool.run(world, on_rank, chunk_bytes, entropy)
    close = [i for i in range(TOKENS) if i != 3]
    for found, found_entropy, _ in results:
        # float32 with logits of about 20; row 3 has logits of 1e4 / 0.6, whose spacing is 2e-3
        expected = chosen.detach().float()
        torch.testing.assert_close(torch.from_numpy(found)[close], expected[close], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.from_numpy(found)[3], expected[3], atol=1e-2, rtol=0)
        if entropy:
            expected = uncertainty.detach().float()
            torch.testing.assert_close(
                torch.from_numpy(found_entropy)[close], expected[close], atol=1e-5, rtol=0
            )
    gradient = torch.cat([torch.from_numpy(g) for _, _, g in results], -1)
    assert z.grad is not None
    torch.testing.assert_close(gradient[close], z.grad.float()[close], atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_bytes", [None, 100])
def test_no_tokens_at_all(pool: Pool, chunk_bytes: int | None) -> None:
    for log_p, uncertainty, gradient in pool.run(2, on_rank, chunk_bytes, True, 0):
        assert (log_p.shape, uncertainty.shape, gradient.shape) == ((0,), (0,), (0, VOCAB // 2))
