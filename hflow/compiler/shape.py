"""The architecture of a model, as far as planning and building need it: read from ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args

from hflow.compiler.kept_hash import KeptHash
from hflow.diagnostics import Diagnostic, HflowError, Span, did_you_mean
from hflow.graph.graph import Head

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = get_args(Family)
NAMED = "shape:"


@dataclass(frozen=True)
class Experts:
    """Every layer has `num_experts` gated MLPs of width `ffn`; each token passes through `top_k` of them."""

    num_experts: int
    top_k: int
    ffn: int


@dataclass(frozen=True)
class ModelShape(KeptHash):
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

    __hash__ = KeptHash.__hash__  # a dataclass would make another

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

    @cached_property
    def num_parameters(self) -> int:
        from hflow.compiler.weights import stage_elements

        return stage_elements(self, 1, 1)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of the experts only `top_k` in each layer."""
        if self.moe is None:
            return self.num_parameters
        idle = self.moe.num_experts - self.moe.top_k
        return self.num_parameters - self.num_layers * idle * 3 * self.hidden * self.moe.ffn

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def read_shape(path: str, span: Span | None = None, head: Head = "lm") -> ModelShape:
    """The shape of the HF model in folder `path`, or, for ``shape:NAME``, of the well-known model NAME; with
    `head`.

    Raises:
        HflowError: HF303 when the name is unknown, there is no ``config.json``, it is not of a known family,
            or it asks for something that hflow does not know (e.g. scaled rotary positions).
    """
    if path.startswith(NAMED):
        return named_shape(path.removeprefix(NAMED), span).with_head(head)
    file = Path(path) / "config.json"
    try:
        config: Any = json.loads(file.read_text())
    except FileNotFoundError:
        command = f"hflow new-model {path}" + " --head scalar" * (head == "scalar")
        help_ = (
            f"`path` is a local folder with an HF model, nothing is downloaded; `{command}` makes a tiny one"
        )
        raise HflowError(Diagnostic("HF303", f"no file `{file}`", span, help_)) from None
    except (OSError, ValueError) as error:
        raise HflowError(Diagnostic("HF303", f"`{file}` cannot be read: {error}", span)) from None
    problem = "no JSON object"
    if isinstance(config, dict):
        config = cast("dict[str, Any]", config)
        problem = _unsupported(config)
    if problem:
        raise HflowError(Diagnostic("HF303", f"`{file}`: {problem}", span))
    try:
        shape = _shape(config)
    except KeyError as missing:
        raise HflowError(Diagnostic("HF303", f"`{file}` has no key {missing}", span)) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise HflowError(
            Diagnostic("HF303", f"`{file}` has a value of the wrong kind: {error}", span)
        ) from None
    for name, value in _numbers(shape):
        if value < 1:
            raise HflowError(Diagnostic("HF303", f"`{file}`: {name} is {value}", span))
    return shape.with_head(head)


def named_shape(name: str, span: Span | None = None) -> ModelShape:
    """The shape of a well-known model. Raises HflowError HF303 when there is none of this name."""
    from hflow.compiler.named_shapes import NAMED_SHAPES

    shape = NAMED_SHAPES.get(name)
    if shape is None:
        help_ = did_you_mean(name, NAMED_SHAPES, "shapes")
        raise HflowError(Diagnostic("HF303", f"no shape is called `{name}`", span, help_))
    return shape


def _numbers(shape: ModelShape) -> Iterator[tuple[str, int]]:
    """The sizes, which must all be positive."""
    for part in (shape.moe, shape):
        entries = vars(part).items() if part else ()
        yield from ((k, v) for k, v in entries if isinstance(v, int) and not isinstance(v, bool))


def _unsupported(config: dict[str, Any]) -> str:
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"model_type `{family}` is not supported; families: {', '.join(FAMILIES)}"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act `{config['hidden_act']}` is not supported (silu is)"
    if config.get("use_sliding_window"):
        return "sliding-window attention is not supported"
    if config.get("mlp_bias") or (family != "qwen2" and config.get("attention_bias")):
        return f"{family} with biases is not supported"
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        return "experts in some layers only are not supported"
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, dict):
            return f"{key} is no JSON object"
    rope: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return f"scaled rotary positions ({rope}) are not supported"
    return ""


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _shape(config: dict[str, Any]) -> ModelShape:
    family: Family = config["model_type"]
    heads, head_dim = _heads(config)
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    experts = _experts(config) if family == "qwen3_moe" else None
    return ModelShape(
        family=family,
        num_layers=_whole(config["num_hidden_layers"]),
        hidden=_whole(config["hidden_size"]),
        num_heads=heads,
        num_kv_heads=_whole(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        ffn=experts.top_k * experts.ffn if experts else _whole(config["intermediate_size"]),
        vocab=_whole(config["vocab_size"]),
        max_positions=_whole(config["max_position_embeddings"]),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        moe=experts,
    )


def _heads(config: dict[str, Any]) -> tuple[int, int]:
    """How many heads, and how wide each is."""
    heads, hidden = _whole(config["num_attention_heads"]), _whole(config["hidden_size"])
    groups = _whole(config.get("num_key_value_heads") or heads)
    if heads % groups:
        raise ValueError(f"{heads} heads are no multiple of {groups} key-value heads")
    if not config.get("head_dim") and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of {heads} heads")
    return heads, _whole(config.get("head_dim") or hidden // heads)


def _experts(config: dict[str, Any]) -> Experts:
    """transformers 5 calls `num_local_experts` what the published files call `num_experts`."""
    count = config.get("num_experts") or config["num_local_experts"]
    experts = Experts(
        _whole(count), _whole(config["num_experts_per_tok"]), _whole(config["moe_intermediate_size"])
    )
    if experts.top_k > experts.num_experts:
        raise ValueError(f"{experts.top_k} of {experts.num_experts} experts per token")
    return experts
