"""What replaces Megatron's operations around the matrix products, against plain formulas and autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.functional import silu
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hflow.cost.memory import layer_activation_bytes
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.groups import make_groups
from hflow.runtime.engines.megatron.attention import TokenPlaces
from hflow.runtime.engines.megatron.build import build_model
from hflow.runtime.engines.megatron.gated import SwiGLU
from hflow.runtime.engines.megatron.pack import Pack
from hflow.runtime.engines.megatron.rotary import Rotation
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.worker.world import World

HEAD_DIM, THETA = 8, 1e4


def test_gated_activation() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 14, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(SwiGLU(None)(x), silu(gate) * up)
    assert gradcheck(SwiGLU(None), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activation_keeps_what_comes_in(dtype: torch.dtype) -> None:
    """And nothing else; its gradient is autograd's, up to the order of products."""
    torch.manual_seed(1)
    x = torch.randn(50, 64).to(dtype).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        SwiGLU(None)(x).square().mean().backward()
    assert sum(t.data_ptr() == x.data_ptr() for t in kept) == 1 and len(kept) == 2  # and square's input
    found, x.grad = x.grad, None
    gate, up = x.chunk(2, -1)
    (silu(gate) * up).square().mean().backward()
    assert found is not None and x.grad is not None
    rtol, atol = (0.02, 1e-4) if dtype == torch.bfloat16 else (1e-5, 1e-8)
    torch.testing.assert_close(found, x.grad, rtol=rtol, atol=atol)


def test_rotary_positions_are_those_of_transformers() -> None:
    torch.manual_seed(2)
    positions, x = torch.tensor([0, 1, 5, 3, 700]), torch.randn(5, 3, HEAD_DIM)
    rope = {"rope_type": "default", "rope_theta": THETA}
    config = LlamaConfig(hidden_size=HEAD_DIM, num_attention_heads=1, head_dim=HEAD_DIM, rope_parameters=rope)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos, sin)
    found = Rotation.of(positions, HEAD_DIM, THETA, torch.float32)(x)
    torch.testing.assert_close(found, expected.transpose(1, 2)[0], rtol=0, atol=1e-6)


def test_gradients_turn_back() -> None:
    torch.manual_seed(3)
    rotation = Rotation.of(torch.arange(4), HEAD_DIM, THETA, torch.float64)
    x = torch.randn(4, 2, 3 * HEAD_DIM, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: rotation(x[..., HEAD_DIM : 2 * HEAD_DIM]), (x,))  # a part of Q, K and V


@pytest.fixture
def world() -> Iterator[World]:
    world = World.join(HashStore(), 0, 1, torch.device("cpu"))
    yield world
    world.close()


def test_a_layer_keeps_what_the_planner_counts(world: World) -> None:
    """For its backward pass, on a CPU: there torch makes the norms of two operations, which also keep what
    comes between, and one number per token and head of the norms and of attention."""
    shape, mesh = ModelShape("qwen2", 1, 64, 8, 2, 8, 172, 97, 64, 1e4, 1e-6, False, True), Mesh.of((0,))
    groups = make_groups(mesh, 0, world.group)
    assert groups
    model: Any = build_model(shape, mesh, "f32", groups, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rows, length = 6, 20
    prompts = torch.ones(rows, dtype=torch.int64)
    pack = Pack.of(Sequences(torch.randint(97, (rows, length)), prompts, length - prompts))
    rotation = Rotation.of(pack.positions, shape.head_dim, THETA, torch.float32)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = len(pack.tokens)
    x = torch.randn(tokens, 1, shape.hidden, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.decoder.layers[0](x, attention_mask=TokenPlaces(pack, rotation))
    found = sum(size for at, size in kept.items() if at not in weights)
    planned, norms = layer_activation_bytes(shape, "f32", tokens, mesh), 2 * 4 * tokens * shape.hidden
    small = 4 * tokens * (8 + shape.num_heads + shape.head_dim)  # and positions, sines and cosines
    assert planned + norms <= found <= planned + norms + small
