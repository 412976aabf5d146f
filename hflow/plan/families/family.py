"""What a model family says of itself, and how its ``config.json`` becomes a `ModelShape`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hflow.graph.ir import Head
from hflow.plan.families.rotary import no_scaling_conflict, read_scaling, rope_theta
from hflow.plan.model_config import MAX_LAYERS, ConfigError, ModelConfig
from hflow.plan.model_shape import Experts, FamilyName, LatentAttention, ModelShape, SlidingWindow
from hflow.plan.rotary_scaling import LongRopeScaling, RotaryScaling

# What is wrong with a file, for the family of this name; empty when nothing is.
Check = Callable[[ModelConfig, str], str]


def every_token(config: ModelConfig, layers: int) -> None:
    """Of families without windows. Raises ConfigError when the file asks for some."""
    if config.flag("use_sliding_window") or set(map(str, config.items("layer_types"))) - {"full_attention"}:
        raise ConfigError(
            "`use_sliding_window`, `layer_types`: sliding-window attention is not supported in this family"
            " (full_attention in all layers is; mistral, qwen2 and qwen3 have windows)"
        )


def no_experts(config: ModelConfig, layers: int) -> None:
    """Of families with one MLP in each layer."""


def no_latent(config: ModelConfig) -> None:
    """Of families with grouped-query attention."""


def whole_heads(config: ModelConfig, head_dim: int) -> int | None:
    """Of families whose heads turn as a whole, which `partial_rotary` of `checks` sees to."""


def all_entries(config: ModelConfig) -> ModelConfig:
    """Of families whose layers turn alike."""
    return config


def nothing_else(config: ModelConfig, shape: ModelShape) -> ModelShape:
    """Of families that `Family` describes."""
    return shape


@dataclass(frozen=True)
class FusedTensor:
    """A tensor of a layer in a family's files that holds several parameters, one after the other along its
    rows: ``self_attn.qkv_proj``, say, and the modules of its `parts`."""

    module: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """Models of one `model_type`.

    Attributes:
        architecture: how the names of transformers' classes begin: ``Qwen2`` of ``Qwen2ForCausalLM``.
        classifier: the same of models with a scalar head, where it is another.
        runs: the engines build and train it; else it is only planned.
        qkv_bias, qk_norm: see `ModelShape`; a text is the key of the file that says so.
        head_dim: the width of a head where the file does not say; None: that of ``hidden / heads``.
        tied, norm_eps: see `ModelShape`; where the file does not say.
        checks: for what the file may ask that makes another model than `ModelShape` says.
        window, experts: read from a file with so many layers; they raise ConfigError.
        latent, scaling: read from a file, as these; the latter with the number of its positions.
        rotary_dim: read from a file, of heads of this width; see `ModelShape`.
        fused: tensors of its files that are several parameters.
        stacked_experts: in its files a tensor holds one matrix of all experts of a layer, transposed, and
            another, whose columns alternate, both gate and up.
        rotary: the file as it is read for rotary positions; where layers differ, for those without a window.
        complete: the shape with what no other family has, read from a file.
    """

    name: FamilyName
    architecture: str
    checks: tuple[Check, ...]
    classifier: str = ""
    runs: bool = True
    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    head_dim: int | None = None
    tied: bool = False
    norm_eps: float = 1e-6
    window: Callable[[ModelConfig, int], SlidingWindow | None] = every_token
    experts: Callable[[ModelConfig, int], Experts | None] = no_experts
    latent: Callable[[ModelConfig], LatentAttention | None] = no_latent
    scaling: Callable[[ModelConfig, int], RotaryScaling | None] = read_scaling
    rotary_dim: Callable[[ModelConfig, int], int | None] = whole_heads
    fused: tuple[FusedTensor, ...] = ()
    stacked_experts: bool = False
    rotary: Callable[[ModelConfig], ModelConfig] = all_entries
    complete: Callable[[ModelConfig, ModelShape], ModelShape] = nothing_else

    def class_of(self, head: Head) -> str:
        """The name of transformers' class for such models."""
        if head == "lm":
            return f"{self.architecture}ForCausalLM"
        return f"{self.classifier or self.architecture}ForSequenceClassification"

    def shape(self, config: ModelConfig) -> ModelShape:
        """The model that the file asks for. Raises ConfigError when a value is missing, of the wrong kind, or
        asks for what hflow does not know."""
        for problem in filter(None, (check(config, self.name) for check in self.checks)):
            raise ConfigError(problem)
        latent = self.latent(config)
        heads, kv_heads, head_dim = self._latent_heads(config) if latent else self._heads(config)
        layers = config.size("num_hidden_layers", most=MAX_LAYERS)
        experts = self.experts(config, layers)
        vocab, positions = config.size("vocab_size"), config.size("max_position_embeddings")
        window, rotary = self.window(config, layers), self.rotary(config)
        no_scaling_conflict(rotary)
        scaling = self.scaling(rotary, positions)
        if isinstance(scaling, LongRopeScaling):
            positions = min(positions, scaling.original_max_positions)
        config.check_end(vocab)
        shape = ModelShape(
            family=self.name,
            num_layers=layers,
            hidden=config.size("hidden_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=experts.width if experts else config.size("intermediate_size"),
            vocab=vocab,
            max_positions=positions,
            rope_theta=rope_theta(rotary),
            norm_eps=config.number("rms_norm_eps", self.norm_eps, zero=True),
            tied=config.flag("tie_word_embeddings") if config.has("tie_word_embeddings") else self.tied,
            qkv_bias=_said(config, self.qkv_bias),
            qk_norm=_said(config, self.qk_norm),
            moe=experts,
            latent=latent,
            scaling=scaling,
            # a window over all positions hides none
            window=window if window and (window.size < positions or window.rope_theta) else None,
            rotary_dim=self.rotary_dim(rotary, head_dim),
        )
        return self.complete(config, shape)

    def _heads(self, config: ModelConfig) -> tuple[int, int, int]:
        """How many heads, how many of keys and values, and how wide each is."""
        heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
        groups = config.size("num_key_value_heads", heads)
        if heads % groups:
            raise ConfigError(f"{heads} heads are no multiple of {groups} key-value heads")
        given = config.has("head_dim") or self.head_dim is not None
        if not given and hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is no multiple of {heads} heads")
        width = config.size("head_dim", self.head_dim or hidden // heads)
        if width % 2:
            raise ConfigError(f"heads are {width} wide; rotary positions need an even width")
        return heads, groups, width

    def _latent_heads(self, config: ModelConfig) -> tuple[int, int, int]:
        """The same of latent attention, where each head has a key and a value of its own."""
        heads = config.size("num_attention_heads")
        return heads, heads, config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim")


def _said(config: ModelConfig, answer: bool | str) -> bool:
    return config.flag(answer) if isinstance(answer, str) else answer
