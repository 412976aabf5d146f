"""The shape of a model, read from its ``config.json`` or known by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hflow.bounded_read import UnreadableError
from hflow.diagnostics import Diagnostic, HflowError, Span, did_you_mean
from hflow.graph.ir import Head
from hflow.plan.model_config import CONFIG, MAX_EXPERTS, MAX_LAYERS, ConfigError, ModelConfig, read_config
from hflow.plan.model_shape import BUILT, FAMILIES, NAMED, Experts, Family, ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES


def read_shape(path: str, span: Span | None = None, head: Head = "lm", tiny: str = "") -> ModelShape:
    """The shape of the HF model in folder `path`, or, for ``shape:NAME``, of the well-known model NAME; with
    `head`.

    Args:
        tiny: options of `hflow new-model` for the model that the help proposes where there is none.

    Raises:
        HflowError: HF303 when the name is unknown, there is no ``config.json``, it is not of a known family,
            or it asks for something that hflow does not know (e.g. scaled rotary positions).
    """
    if path.startswith(NAMED):
        return named_shape(path.removeprefix(NAMED), span).with_head(head)
    file = Path(path) / CONFIG
    try:
        return _shape(read_config(file)).with_head(head)
    except UnreadableError as error:
        raise HflowError(_unread(path, file, error, span, tiny)) from None
    except ConfigError as error:
        raise HflowError(Diagnostic("HF303", f"`{file}`: {error}", span)) from None


def _unread(path: str, file: Path, error: UnreadableError, span: Span | None, tiny: str) -> Diagnostic:
    if error.reason != "missing":
        return Diagnostic("HF303", f"`{file}` cannot be read: {error}", span)
    command = " ".join(filter(None, ("hflow new-model", path, tiny)))
    help_ = f"`path` is a local folder with an HF model, nothing is downloaded; `{command}` makes a tiny one"
    return Diagnostic("HF303", f"no file `{file}`", span, help_)


def named_shape(name: str, span: Span | None = None) -> ModelShape:
    """The shape of a well-known model. Raises HflowError HF303 when there is none of this name."""
    shape = NAMED_SHAPES.get(name)
    if shape is None:
        help_ = did_you_mean(name, NAMED_SHAPES, "shapes")
        raise HflowError(Diagnostic("HF303", f"no shape is called `{name}`", span, help_))
    return shape


def _shape(config: ModelConfig) -> ModelShape:
    """Raises ConfigError when a value is missing, of the wrong kind, or asks for what hflow does not know."""
    family = _family(config)
    for problem in _unsupported(config, family):
        raise ConfigError(problem)
    heads, kv_heads, head_dim = _heads(config)
    layers = config.size("num_hidden_layers", most=MAX_LAYERS)
    experts = _experts(config, layers) if family == "qwen3_moe" else None
    vocab = config.size("vocab_size")
    config.check_end(vocab)
    return ModelShape(
        family=family,
        num_layers=layers,
        hidden=config.size("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=experts.top_k * experts.ffn if experts else config.size("intermediate_size"),
        vocab=vocab,
        max_positions=config.size("max_position_embeddings"),
        rope_theta=config.inner("rope_parameters").number("rope_theta", config.number("rope_theta", 10000.0)),
        norm_eps=config.number("rms_norm_eps", 1e-6, zero=True),
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        moe=experts,
    )


def _family(config: ModelConfig) -> Family:
    name = config.entries.get("model_type")
    if name not in FAMILIES:
        planned = ", ".join(f for f in FAMILIES if f not in BUILT)
        raise ConfigError(
            f"model_type `{name}` is not supported; {', '.join(BUILT)} run, {planned} can only be planned"
        )
    return name


def _unsupported(config: ModelConfig, family: Family) -> Iterator[str]:
    """What the file asks for that would be another model than hflow builds."""
    if config.entries.get("hidden_act", "silu") != "silu":
        yield f"hidden_act `{config.entries['hidden_act']}` is not supported (silu is)"
    if config.flag("use_sliding_window") or set(map(str, config.items("layer_types"))) - {"full_attention"}:
        yield "sliding-window attention is not supported"
    if config.flag("mlp_bias") or (config.flag("attention_bias") and family != "qwen2"):
        yield f"{family} with biases is not supported"
    if config.size("decoder_sparse_step", 1) != 1 or config.items("mlp_only_layers"):
        yield "experts in some layers only are not supported"
    if config.has("quantization_config"):
        yield "quantized weights (quantization_config) are not supported"
    for rotary in (config, *_rotary(config)):
        if rotary.number("partial_rotary_factor", 1.0) != 1:
            yield "rotary positions in a part of each head are not supported"
    for rotary in _rotary(config):
        kind = rotary.entries.get("rope_type", rotary.entries.get("type", "default"))
        if kind != "default":
            yield f"scaled rotary positions ({kind}) are not supported"


def _rotary(config: ModelConfig) -> tuple[ModelConfig, ModelConfig]:
    """What the file says of rotary positions: the older and the newer key."""
    return config.inner("rope_scaling"), config.inner("rope_parameters")


def _heads(config: ModelConfig) -> tuple[int, int, int]:
    """How many heads, how many of keys and values, and how wide each is."""
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    groups = config.size("num_key_value_heads", heads)
    if heads % groups:
        raise ConfigError(f"{heads} heads are no multiple of {groups} key-value heads")
    if not config.has("head_dim") and hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is no multiple of {heads} heads")
    width = config.size("head_dim", hidden // heads)
    if width % 2:
        raise ConfigError(f"heads are {width} wide; rotary positions need an even width")
    return heads, groups, width


def _experts(config: ModelConfig, layers: int) -> Experts:
    """transformers 5 calls `num_local_experts` what the published files call `num_experts`."""
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = Experts(
        config.size(key, most=MAX_EXPERTS // layers),
        config.size("num_experts_per_tok"),
        config.size("moe_intermediate_size"),
    )
    if experts.top_k > experts.num_experts:
        raise ConfigError(f"{experts.top_k} of {experts.num_experts} experts per token")
    return experts
