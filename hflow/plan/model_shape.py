"""The architecture of a model, as far as planning and building need it: read from ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, get_args

from hflow.graph.ir import Head
from hflow.plan.cached_hash import CachedHash

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = get_args(Family)
BUILT: tuple[Family, ...] = ("llama", "qwen2")  # by an engine that trains; others are only planned
NAMED = "shape:"


@dataclass(frozen=True)
class Experts:
    """Every layer has `num_experts` gated MLPs of width `ffn`; each token passes through `top_k` of them."""

    num_experts: int
    top_k: int
    ffn: int


@dataclass(frozen=True)
class ModelShape(CachedHash):
    """A decoder with RMSNorm, rotary positions, grouped-query attention, and a gated MLP or experts.

    `ffn`: width of the MLP that a token passes through; with experts that of all its `top_k` together.
    `qk_norm`: queries and keys are normalised, each head by itself.
    `head`: ``lm`` gives each position a logit per token of the vocabulary, ``scalar`` one number.
    """

    family: Family
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

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    __hash__ = CachedHash.__hash__  # a dataclass would make another

    def with_head(self, head: Head) -> ModelShape:
        """The same decoder under another head; the embedding is nothing that a scalar head could share."""
        return replace(self, head=head, tied=self.tied and head == "lm")

    @property
    def outputs(self) -> int:
        """Numbers that the head gives each position."""
        return self.vocab if self.head == "lm" else 1

    @property
    def mlp_width(self) -> int:
        """Width of one MLP, which tensor parallelism splits."""
        return self.moe.ffn if self.moe else self.ffn

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes
