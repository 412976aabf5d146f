"""The architecture of a model, as far as planning and building need it: read from ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

from hflow.graph.ir import Head
from hflow.plan.cached_hash import CachedHash
from hflow.plan.rotary_scaling import RotaryScaling

FamilyName = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]  # `model_type` in config.json
NAMED = "shape:"


@dataclass(frozen=True)
class Experts:
    """Every layer has `num_experts` gated MLPs of width `ffn`; each token passes through `top_k` of them."""

    num_experts: int
    top_k: int
    ffn: int


@dataclass(frozen=True)
class SlidingWindow:
    """In `layers` (numbers from 0, ascending) a token sees itself and the ``size - 1`` tokens before it."""

    size: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape(CachedHash):
    """A decoder with RMSNorm, rotary positions, grouped-query attention, and a gated MLP or experts.

    What families have in common and what they differ in (`hflow.plan.families`) is said here once: planner,
    import, export and engines read this, and never ask which family it is.

    `ffn`: width of the MLP that a token passes through; with experts that of all its `top_k` together.
    `qkv_bias`: the projections to queries, keys and values have biases; no others do.
    `qk_norm`: queries and keys are normalised, each head by itself.
    `scaling`: of rotary positions, which begin with `rope_theta`. `window`: None, if every token sees all
    before it.
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

    def window_of(self, layer: int) -> int | None:
        """How many tokens one sees in a layer, itself included; None: all up to it."""
        return self.window.size if self.window and layer in self.window.layers else None

    def seen(self, context: float) -> float:
        """How many of `context` tokens one sees, on average over the layers."""
        if self.window is None:
            return context
        hidden = max(0.0, context - self.window.size) * len(self.window.layers)
        return context - hidden / self.num_layers

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes
