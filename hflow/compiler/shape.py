"""The architecture of a model, as far as planning and building need it: read from ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hflow.diagnostics import Diagnostic, HflowError, Span
from hflow.graph.graph import Head

FAMILIES = ("llama", "qwen2")


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with RMSNorm, rotary positions, gated MLP and grouped-query attention.

    `head`: ``lm`` gives each position a logit per token of the vocabulary, ``scalar`` one number.
    """

    family: Literal["llama", "qwen2"]
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

    def with_head(self, head: Head) -> ModelShape:
        """The same decoder under another head; the embedding is nothing that a scalar head could share."""
        return replace(self, head=head, tied=self.tied and head == "lm")

    @property
    def outputs(self) -> int:
        """Numbers that the head gives each position."""
        return self.vocab if self.head == "lm" else 1

    @property
    def num_parameters(self) -> int:
        from hflow.compiler.weights import parameters

        return sum(p.size for p in parameters(self))


def read_shape(path: str, span: Span | None = None, head: Head = "lm") -> ModelShape:
    """The shape of the HF model in folder `path`, with `head`.

    Raises:
        HflowError: HF303 when there is no ``config.json``, it is not of a known family, or it asks
            for something that hflow does not build (e.g. scaled rotary positions).
    """
    file = Path(path) / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        command = f"hflow new-model {path}" + " --head scalar" * (head == "scalar")
        help_ = f"`path` is a local folder with an HF model; `{command}` makes a tiny one"
        raise HflowError(Diagnostic("HF303", f"no file `{file}`", span, help_)) from None
    except (OSError, ValueError) as error:
        raise HflowError(Diagnostic("HF303", f"`{file}` cannot be read: {error}", span)) from None
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
    for name, value in vars(shape).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise HflowError(Diagnostic("HF303", f"`{file}`: {name} is {value}", span))
    return shape.with_head(head)


def _unsupported(config: dict[str, Any]) -> str:
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"model_type `{family}` is not supported; families: {', '.join(FAMILIES)}"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act `{config['hidden_act']}` is not supported (silu is)"
    if config.get("use_sliding_window"):
        return "sliding-window attention is not supported"
    if config.get("mlp_bias") or (family == "llama" and config.get("attention_bias")):
        return "Llama with biases is not supported"
    rope: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return f"scaled rotary positions ({rope}) are not supported"
    return ""


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _shape(config: dict[str, Any]) -> ModelShape:
    heads = _whole(config["num_attention_heads"])
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    return ModelShape(
        family=config["model_type"],
        num_layers=_whole(config["num_hidden_layers"]),
        hidden=_whole(config["hidden_size"]),
        num_heads=heads,
        num_kv_heads=_whole(config.get("num_key_value_heads") or heads),
        head_dim=_whole(config.get("head_dim") or _whole(config["hidden_size"]) // heads),
        ffn=_whole(config["intermediate_size"]),
        vocab=_whole(config["vocab_size"]),
        max_positions=_whole(config["max_position_embeddings"]),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=config["model_type"] == "qwen2",
    )
