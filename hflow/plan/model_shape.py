"""The architecture of a model, as far as planning and building need it: read from ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import sqrt
from typing import Literal

from hflow.graph.adapter import Adapter
from hflow.graph.ir import Head
from hflow.plan.cached_hash import CachedHash
from hflow.plan.rotary_scaling import RotaryScaling

# `model_type` in config.json
FamilyName = Literal[
    "deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "kimi_k2", "llama", "mistral", "mixtral",
    "phi3", "qwen2", "qwen3", "qwen3_moe",
]  # fmt: skip
# Of the gate of an MLP; gelu_tanh: with tanh in the place of the normal distribution (arXiv:1606.08415).
Activation = Literal["silu", "gelu_tanh"]
NAMED = "shape:"


@dataclass(frozen=True)
class GateClamp:
    """An MLP's gate as in gpt-oss (arXiv:2508.10925, section 2.2): (up + 1) * gate * sigmoid(`slope` * gate),
    of a gate of `limit` at most and of an up between -`limit` and `limit`."""

    slope: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """A layer has `num_experts` gated MLPs of width `ffn`; each token passes through `top_k` of them.

    Attributes:
        shared_ffn: width of one more gated MLP, through which all tokens pass; 0: there is none.
        dense_layers: so many layers, the first ones, have one gated MLP of width `dense_ffn` instead.
        scores_corrected: the router adds a number of each expert to its scores before it chooses.
        normalised: the weights of the chosen experts, which are their probabilities among all, are divided by
            their sum. Read of families that an engine builds.
        mixtral_names: parameters are called as in Mixtral's files: ``block_sparse_moe.experts.0.w1`` instead
            of ``mlp.experts.0.gate_proj``.
        biased: router and experts have biases; the router is called ``mlp.router``, not ``mlp.gate``.
        clamp: of their gates; None: these are silu(gate) * up.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    scores_corrected: bool = False
    normalised: bool = False
    mixtral_names: bool = False
    biased: bool = False
    clamp: GateClamp | None = None

    def parameters_of_one(self, hidden: int) -> int:
        """Of an expert of a model of this width."""
        return 3 * hidden * self.ffn + (2 * self.ffn + hidden if self.biased else 0)

    @property
    def width(self) -> int:
        """Of all MLPs together that a token passes through."""
        return self.top_k * self.ffn + self.shared_ffn


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made of
    one vector of a token, which is all that is cached of it.

    Attributes:
        query_rank: width of what queries are made of.
        rank: width of what keys and values are made of.
        rotary_dim: the part of a head's query and key that turns by its position; of keys all heads share it.
        value_dim: width of a head's value.
    """

    query_rank: int
    rank: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True)
class SlidingWindow:
    """In `layers` (numbers from 0, ascending) a token sees itself and the ``size - 1`` tokens before it.
    `rope_theta`: what the angles of rotary positions begin with there, unscaled; None: as in other layers."""

    size: int
    layers: tuple[int, ...]
    rope_theta: float | None = None


@dataclass(frozen=True)
class ModelShape(CachedHash):
    """A decoder with RMSNorm, rotary positions, grouped-query or latent attention, a gated MLP or experts.

    What families have in common and what they differ in (`hflow.plan.families`) is said here once: planner,
    import, export and engines read this, and never ask which family it is.

    `ffn`: width of the MLP that a token passes through; with experts that of all its `top_k`, and of the one
    that is shared, together.
    `adapter`: the low-rank matrices beside the model's own, if it has any.
    `latent`: None for grouped-query attention; with it, `head_dim` is the width of a query and a key.
    `qkv_bias`: the projections to queries, keys and values have biases; `output_bias`: so has that of what
    attention finds. No others do, but for experts that are `biased`.
    `qk_norm`: queries and keys are normalised, each head by itself.
    `scaling`: of rotary positions, which begin with `rope_theta`. `rotary_dim`: so many dims of a head, the
    first ones, turn by its position; None: all. `window`: None, if every token sees all before it.
    `query_scalar`: what scores are divided by the root of; None: the width of a head.
    `attention_cap`, `logit_cap`: scores before their softmax, and logits, are capped softly: c tanh(x / c)
    instead of x (arXiv:2408.00118, section 2); None: they are not.
    `offset_norms`: norms multiply by 1 + their weight. `post_norms`: what attention and MLP give is
    normalised, too, before it is added. `scaled_embedding`: the embedding is multiplied by the
    root of `hidden`. `sinks`: each head has one more score, learned and of no token, in its softmax.
    `head`: ``lm`` gives each position a logit per token of the vocabulary, ``scalar`` one number.
    """

    family: FamilyName
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    qkv_bias: bool
    head: Head = "lm"
    qk_norm: bool = False
    moe: Experts | None = None
    scaling: RotaryScaling | None = None
    window: SlidingWindow | None = None
    latent: LatentAttention | None = None
    adapter: Adapter | None = None
    rotary_dim: int | None = None
    activation: Activation = "silu"
    query_scalar: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    offset_norms: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    output_bias: bool = False
    sinks: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    __hash__ = CachedHash.__hash__  # a dataclass would make another

    def with_head(self, head: Head) -> ModelShape:
        """The same decoder under another head; the embedding is nothing that a scalar head could share."""
        return replace(self, head=head, tied=self.tied and head == "lm")

    @property
    def base(self) -> ModelShape:
        """Without its adapter."""
        return replace(self, adapter=None) if self.adapter else self

    @property
    def outputs(self) -> int:
        """Numbers that the head gives each position."""
        return self.vocab if self.head == "lm" else 1

    @property
    def explicit_scores(self) -> bool:
        """Whether attention makes its scores in memory: no fused kernel caps them, or knows of sinks."""
        return self.sinks or self.attention_cap is not None

    @property
    def mlp_width(self) -> int:
        """Width of one MLP, which tensor parallelism splits."""
        return self.moe.ffn if self.moe else self.ffn

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return self.num_layers - self.moe.dense_layers if self.moe else 0

    @property
    def query_width(self) -> int:
        """Of the queries of all heads together, as below of keys, values, and what attention gives."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        return self.num_kv_heads * self.value_dim

    def kv_copies(self, tp: int) -> int:
        """How many neighbouring ranks of tp have each key-value head: more than one, where there are more
        ranks than heads."""
        return max(1, tp // self.num_kv_heads)

    def kv_width(self, tp: int) -> int:
        """Of the keys and values of all ranks of tp together."""
        return (self.key_width + self.value_width) * self.kv_copies(tp)

    @property
    def attended_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def value_dim(self) -> int:
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by beside the root of their width."""
        return sqrt(self.head_dim / self.query_scalar) if self.query_scalar else 1.0

    @property
    def latent_width(self) -> int:
        """Of what queries, keys and values are made of, which every rank of tp has; 0 without."""
        return self.latent.query_rank + self.latent.rank + self.latent.rotary_dim if self.latent else 0

    def window_of(self, layer: int) -> int | None:
        """How many tokens one sees in a layer, itself included; None: all up to it."""
        return self.window.size if self.window and layer in self.window.layers else None

    def seen(self, context: float) -> float:
        """How many of `context` tokens one sees, on average over the layers."""
        if self.window is None:
            return context
        hidden = max(0.0, context - self.window.size) * len(self.window.layers)
        return context - hidden / self.num_layers

    def kv_bytes_per_token(self, dtype_bytes: int, tp: int = 1) -> float:
        """What a rank of tp caches of one position in all layers: its part of keys and values, or the whole
        vector of which all heads' are made."""
        if self.latent:
            return self.num_layers * (self.latent.rank + self.latent.rotary_dim) * dtype_bytes
        return self.num_layers * self.kv_width(tp) * dtype_bytes / tp
