"""Well-known models by name, for planning without their files: ``path: shape:llama-7b``.

Sizes are those of the published ``config.json`` files. The Llama family is the one that HybridFlow
measures (arXiv:2409.19256): Llama 2 (arXiv:2307.09288), and Code Llama (arXiv:2308.12950) for 34B. Names
with a version are Llama 3 (arXiv:2407.21783) and newer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log

from hflow.plan.model_shape import (
    Experts,
    FamilyName,
    GateClamp,
    LatentAttention,
    ModelShape,
    SlidingWindow,
)
from hflow.plan.rotary_scaling import LinearScaling, Llama3Scaling, YarnScaling


def _gemma2(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, scalar: float | None = None
) -> ModelShape:
    return ModelShape(
        "gemma2", layers, hidden, heads, kv_heads, head_dim, ffn, vocab=256_000, max_positions=8192,
        rope_theta=1e4, norm_eps=1e-6, tied=True, qkv_bias=False, query_scalar=scalar, attention_cap=50.0,
        logit_cap=30.0, activation="gelu_tanh", offset_norms=True, post_norms=True, scaled_embedding=True,
        window=SlidingWindow(4096, tuple(range(0, layers, 2))),
    )  # fmt: skip


def _gemma3(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, head_dim: int = 256,
    scalar: float | None = None, vocab: int = 262_208, positions: int = 131_072, window: int = 1024,
) -> ModelShape:  # fmt: skip
    """The text model. The smallest one has no scaled positions."""
    sliding = tuple(layer for layer in range(layers) if (layer + 1) % 6)
    return ModelShape(
        "gemma3_text", layers, hidden, heads, kv_heads, head_dim, ffn, vocab=vocab, max_positions=positions,
        rope_theta=1e6, norm_eps=1e-6, tied=True, qkv_bias=False, qk_norm=True, query_scalar=scalar,
        activation="gelu_tanh", offset_norms=True, post_norms=True, scaled_embedding=True,
        scaling=LinearScaling(8.0) if positions > 32_768 else None,
        window=SlidingWindow(window, sliding, rope_theta=1e4),
    )  # fmt: skip


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, positions: int = 4096, theta: float = 1e4
) -> ModelShape:
    return ModelShape(
        "llama", layers, hidden, heads, kv_heads, hidden // heads, ffn, vocab=32_000,
        max_positions=positions, rope_theta=theta, norm_eps=1e-5, tied=False, qkv_bias=False,
    )  # fmt: skip


def _llama3(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    factor: float | None,
    head_dim: int = 128,
    tied: bool = False,
) -> ModelShape:
    """`factor`: of scaling; None for Llama 3.0."""
    return ModelShape(
        "llama", layers, hidden, heads, 8, head_dim, ffn, vocab=128_256,
        max_positions=131_072 if factor else 8192, rope_theta=5e5, norm_eps=1e-5, tied=tied, qkv_bias=False,
        scaling=Llama3Scaling(factor, 1.0, 4.0, 8192) if factor else None,
    )  # fmt: skip


def _mistral(
    layers: int, hidden: int, ffn: int, vocab: int, positions: int = 32_768, theta: float = 1e6,
    window: int | None = None,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        "mistral", layers, hidden, 32, 8, 128, ffn, vocab=vocab, max_positions=positions, rope_theta=theta,
        norm_eps=1e-5, tied=False, qkv_bias=False,
        window=SlidingWindow(window, tuple(range(layers))) if window else None,
    )  # fmt: skip


def _phi(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, positions: int = 4096,
    theta: float = 1e4, window: int | None = None,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        "phi3", layers, hidden, heads, kv_heads, hidden // heads, ffn, vocab=vocab, max_positions=positions,
        rope_theta=theta, norm_eps=1e-5, tied=False, qkv_bias=False,
        window=SlidingWindow(window, tuple(range(layers))) if window else None,
    )  # fmt: skip


def _qwen2(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, tied: bool = False, eps: float = 1e-6
) -> ModelShape:
    return ModelShape(
        "qwen2", layers, hidden, heads, kv_heads, hidden // heads, ffn, vocab=151_936 if tied else 152_064,
        max_positions=32_768, rope_theta=1e6, norm_eps=eps, tied=tied, qkv_bias=True,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> ModelShape:
    return ModelShape(
        "qwen3", layers, hidden, heads, 8, 128, ffn, vocab=151_936, max_positions=40_960, rope_theta=1e6,
        norm_eps=1e-6, tied=tied, qkv_bias=False, qk_norm=True,
    )  # fmt: skip


def _qwen3_moe(layers: int, hidden: int, heads: int, experts: Experts) -> ModelShape:
    return ModelShape(
        "qwen3_moe", layers, hidden, heads, 4, 128, experts.top_k * experts.ffn, vocab=151_936,
        max_positions=40_960, rope_theta=1e6, norm_eps=1e-6, tied=False, qkv_bias=False, qk_norm=True,
        moe=experts,
    )  # fmt: skip


def _deepseek(
    family: FamilyName, heads: int, vocab: int, positions: int, theta: float, experts: int, dense: int
) -> ModelShape:
    """How positions are scaled is left out: no plan depends on it."""
    return ModelShape(
        family, 61, 7168, heads, heads, 192, (8 + 1) * 2048, vocab=vocab, max_positions=positions,
        rope_theta=theta, norm_eps=1e-6, tied=False, qkv_bias=False,
        moe=Experts(
            experts, 8, 2048, shared_ffn=2048, dense_layers=dense, dense_ffn=18_432, scores_corrected=True
        ),
        latent=LatentAttention(query_rank=1536, rank=512, rotary_dim=64, value_dim=128),
    )  # fmt: skip


def _glm(
    layers: int, hidden: int, experts: int, ffn: int, dense: int, dense_ffn: int, norm: bool
) -> ModelShape:
    return ModelShape(
        "glm4_moe", layers, hidden, 96, 8, 128, (8 + 1) * ffn, vocab=151_552, max_positions=131_072,
        rope_theta=1e6, norm_eps=1e-5, tied=False, qkv_bias=True, qk_norm=norm,
        moe=Experts(
            experts, 8, ffn, shared_ffn=ffn, dense_layers=dense, dense_ffn=dense_ffn, scores_corrected=True
        ),
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> ModelShape:
    """OpenAI's open models (arXiv:2508.10925)."""
    return ModelShape(
        "gpt_oss", layers, 2880, 64, 8, 64, 4 * 2880, vocab=201_088, max_positions=131_072, rope_theta=1.5e5,
        norm_eps=1e-5, tied=False, qkv_bias=True, output_bias=True, sinks=True,
        moe=Experts(experts, 4, 2880, normalised=True, biased=True, clamp=GateClamp(1.702, 7.0)),
        scaling=YarnScaling(32.0, 4096, 0.1 * log(32) + 1, truncate=False),
        window=SlidingWindow(128, tuple(range(0, layers, 2))),
    )  # fmt: skip


NAMED_SHAPES: Mapping[str, ModelShape] = {
    "gemma-2-2b": _gemma2(26, 2304, 8, 4, 256, 9216),
    "gemma-2-9b": _gemma2(42, 3584, 16, 8, 256, 14_336),
    "gemma-2-27b": _gemma2(46, 4608, 32, 16, 128, 36_864, scalar=144.0),
    "gemma-3-1b": _gemma3(26, 1152, 4, 1, 6912, vocab=262_144, positions=32_768, window=512),
    "gemma-3-4b": _gemma3(34, 2560, 8, 4, 10_240),
    "gemma-3-12b": _gemma3(48, 3840, 16, 8, 15_360),
    "gemma-3-27b": _gemma3(62, 5376, 32, 16, 21_504, head_dim=128, scalar=168.0),
    "llama-7b": _llama(32, 4096, 32, 32, 11_008),
    "llama-13b": _llama(40, 5120, 40, 40, 13_824),
    "llama-34b": _llama(48, 8192, 64, 8, 22_016, positions=16_384, theta=1e6),
    "llama-70b": _llama(80, 8192, 64, 8, 28_672),
    "llama-3-8b": _llama3(32, 4096, 32, 14_336, None),
    "llama-3-70b": _llama3(80, 8192, 64, 28_672, None),
    "llama-3.1-8b": _llama3(32, 4096, 32, 14_336, 8.0),
    "llama-3.1-70b": _llama3(80, 8192, 64, 28_672, 8.0),
    "llama-3.1-405b": _llama3(126, 16_384, 128, 53_248, 8.0),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8192, 32.0, head_dim=64, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8192, 32.0, tied=True),
    "llama-3.3-70b": _llama3(80, 8192, 64, 28_672, 8.0),
    "mistral-7b-v0.1": _mistral(32, 4096, 14_336, 32_000, theta=1e4, window=4096),
    "mistral-7b-v0.2": _mistral(32, 4096, 14_336, 32_000),
    "mistral-7b-v0.3": _mistral(32, 4096, 14_336, 32_768),
    "mistral-nemo-12b": _mistral(40, 5120, 14_336, 131_072, positions=131_072),
    "mistral-small-24b": _mistral(40, 5120, 32_768, 131_072, theta=1e8),
    "phi-3-mini-4k": _phi(32, 3072, 32, 32, 8192, 32_064, window=2047),
    "phi-3-medium-4k": _phi(40, 5120, 40, 10, 17_920, 32_064, window=2047),
    "phi-4": _phi(40, 5120, 40, 10, 17_920, 100_352, positions=16_384, theta=2.5e5),
    # With the positions of its pretraining, in which LongRoPE's short factors hold; no plan depends on these.
    "phi-4-mini": replace(_phi(32, 3072, 24, 8, 8192, 200_064), tied=True, rotary_dim=96),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11_008, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18_944),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13_824, eps=1e-5),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27_648, eps=1e-5),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29_568, eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, Experts(128, top_k=8, ffn=768, normalised=True)),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, Experts(128, top_k=8, ffn=1536, normalised=True)),
    "deepseek-v3": _deepseek("deepseek_v3", 128, 129_280, 163_840, 1e4, experts=256, dense=3),
    "kimi-k2": _deepseek("kimi_k2", 64, 163_840, 131_072, 5e4, experts=384, dense=1),
    "glm-4.5": _glm(92, 5120, 160, 1536, dense=3, dense_ffn=12_288, norm=True),
    "glm-4.5-air": _glm(46, 4096, 128, 1408, dense=1, dense_ffn=10_944, norm=False),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
