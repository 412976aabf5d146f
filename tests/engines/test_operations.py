"""What replaces Megatron's operations around the matrix products, against plain formulas and autograd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hflow.cost.activation_memory import layer_activation_bytes
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import Experts, GateClamp, ModelShape
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.groups import make_groups
from hflow.runtime.engines.megatron import attention
from hflow.runtime.engines.megatron.attention import TokenPlaces
from hflow.runtime.engines.megatron.build import build_model
from hflow.runtime.engines.megatron.gated import GeGLU, SwiGLU
from hflow.runtime.engines.megatron.pack import Pack
from hflow.runtime.engines.megatron.rotary import Rotation, frequencies
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.worker.world import World
from tests.engines.memory import torch_operations

HEAD_DIM, THETA = 8, 1e4
SHAPE = ModelShape("llama", 1, 64, 8, 2, HEAD_DIM, 172, 97, 64, THETA, 1e-6, False, False)


@pytest.mark.parametrize(("gated", "name"), [(SwiGLU, "silu"), (GeGLU, "gelu_pytorch_tanh")])
def test_gated_activation(gated: type[SwiGLU], name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 14, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(gated(None)(x), ACT2FN[name](gate) * up)
    assert gradcheck(gated(None), (x,))


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
    found = Rotation.of(positions, SHAPE, torch.float32)(x)
    torch.testing.assert_close(found, expected.transpose(1, 2)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("rotary", [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.8, "beta_slow": 2.0},
])  # fmt: skip
def test_scaled_angles_are_those_of_transformers(
    tmp_path: Path, rotary: dict[str, Any], head_dim: int, theta: float
) -> None:
    """Its own functions, on the configuration that hflow reads: frequencies and the factor of sines and
    cosines."""
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131_072,
        rope_parameters={"rope_theta": theta} | rotary,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    expected, factor = ROPE_INIT_FUNCTIONS[rotary["rope_type"]](config, torch.device("cpu"))
    shape = read_shape(str(tmp_path))
    torch.testing.assert_close(frequencies(shape, torch.device("cpu")), expected, rtol=2e-6, atol=0)
    turned = Rotation.of(torch.zeros(1, dtype=torch.int64), shape, torch.float32)
    assert turned.cos[0].tolist() == pytest.approx([factor] * (head_dim // 2), rel=1e-6)


def masked(window: int, q: Tensor, k: Tensor, v: Tensor, present: Tensor | None) -> Tensor:
    """Attention with a matrix of all scores."""
    at = torch.arange(q.shape[2])
    seen = (at[:, None] >= at) & (at[:, None] - at < window)
    if present is not None:
        seen = ((seen & present[:, None]) | torch.eye(len(at), dtype=torch.bool))[:, None]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [1, 3, 7, 8, 9, 30])
@pytest.mark.parametrize("length", [5, 8, 24, 29])
def test_windows_are_masks(monkeypatch: pytest.MonkeyPatch, length: int, window: int, padded: bool) -> None:
    """Also where they lie over several chunks, with gradients."""
    monkeypatch.setattr(attention, "CHUNK", 8)
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, heads, length, 4, dtype=torch.float64) for heads in (4, 2, 2))
    present = torch.arange(length) >= torch.tensor([[0], [length // 2]]) if padded else None
    tensors = [x.requires_grad_() for x in (q, k, v)]
    found, expected = attention.attend_within(window, q, k, v, present), masked(window, q, k, v, present)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    for mine, theirs in zip(*(torch.autograd.grad((x * weights).sum(), tensors) for x in (found, expected))):
        torch.testing.assert_close(mine, theirs)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_memory_of_a_window_grows_with_the_length() -> None:
    """No tensor has an element for every pair of tokens: the largest is one of queries, or a chunk's mask."""
    window, length, width = 256, 8 * attention.CHUNK, 16
    q, k, v = (torch.randn(1, 1, length, width, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        attention.attend_within(window, q, k, v).sum().backward()
    assert largest.elements <= max(length * width, attention.CHUNK * (attention.CHUNK + window))
    assert largest.elements < length**2 / 40


def test_gradients_turn_back() -> None:
    torch.manual_seed(3)
    rotation = Rotation.of(torch.arange(4), SHAPE, torch.float64)
    x = torch.randn(4, 2, 3 * HEAD_DIM, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: rotation(x[..., HEAD_DIM : 2 * HEAD_DIM]), (x,))  # a part of Q, K and V


@pytest.fixture
def world() -> Iterator[World]:
    world = World.join(HashStore(), 0, 1, torch.device("cpu"))
    yield world
    world.close()


@pytest.mark.parametrize("moe", [None, Experts(8, top_k=2, ffn=86, normalised=True)], ids=["dense", "moe"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_layer_keeps_what_the_planner_counts(world: World, qk_norm: bool, moe: Experts | None) -> None:
    """For its backward pass. Of experts the copies of tokens, before and after; a few numbers of each token,
    head and expert are left out."""
    shape = ModelShape("qwen2", 1, 64, 8, 2, 8, 172, 97, 64, 1e4, 1e-6, False, True, qk_norm=qk_norm, moe=moe)
    _assert_keeps_what_is_counted(world, shape)


@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_layer_with_norms_behind_keeps_what_the_planner_counts(
    world: World, qk_norm: bool, cap: float | None
) -> None:
    """As Gemma's. Attention that caps its scores keeps no output by rows."""
    shape = ModelShape(
        "gemma2", 1, 64, 8, 2, 8, 172, 97, 64, 1e4, 1e-6, True, False, qk_norm=qk_norm, post_norms=True,
        attention_cap=cap,
    )  # fmt: skip
    _assert_keeps_what_is_counted(world, shape)


def test_a_layer_with_sinks_keeps_what_the_planner_counts(world: World) -> None:
    """As gpt-oss': biases keep nothing, clamped gates what goes into them."""
    moe = Experts(8, top_k=2, ffn=86, normalised=True, biased=True, clamp=GateClamp(1.702, 7.0))
    shape = ModelShape(
        "gpt_oss", 1, 64, 8, 2, 8, 172, 97, 64, 1e4, 1e-6, True, True, moe=moe, output_bias=True, sinks=True
    )
    _assert_keeps_what_is_counted(world, shape)


def _assert_keeps_what_is_counted(world: World, shape: ModelShape) -> None:
    mesh = Mesh.of((0,))
    groups = make_groups(Sharding(mesh), 0, world.group)
    assert groups
    model: Any = build_model(shape, mesh, "f32", groups, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rows, length = 6, 20
    prompts = torch.ones(rows, dtype=torch.int64)
    pack = Pack.of(Sequences(torch.randint(97, (rows, length)), prompts, length - prompts))
    rotation = Rotation.of(pack.positions, shape, torch.float32)
    planned = layer_activation_bytes(shape, "f32", len(pack.tokens), mesh)
    small = 4 * len(pack.tokens) * (8 + shape.num_heads + shape.head_dim)  # and positions, sines and cosines
    if shape.moe:
        small += len(pack.tokens) * (4 * shape.moe.num_experts + 8 * 4 * shape.moe.top_k)
    with torch_operations():
        found = _kept_bytes(model, pack, rotation)
    assert planned <= found <= planned + small
    by_kernels = _kept_bytes(model, pack, rotation)  # which have no output by rows
    by_rows = 0 if shape.explicit_scores else 4 * len(pack.tokens) * shape.attended_width
    assert planned - by_rows <= by_kernels <= planned - by_rows + small


def _kept_bytes(model: Any, pack: Pack, rotation: Rotation) -> int:
    """What the first layer keeps for its backward pass, beside weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(len(pack.tokens), 1, model.config.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.decoder.layers[0](x, attention_mask=TokenPlaces(pack, rotation))
    return sum(size for at, size in kept.items() if at not in weights)
