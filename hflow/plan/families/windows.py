"""What a ``config.json`` says of sliding windows, as transformers applies them."""

from __future__ import annotations

from typing import Any

from hflow.plan.model_config import MAX_SIZE, ConfigError, ModelConfig
from hflow.plan.model_shape import SlidingWindow

DEFAULT_SIZE = 4096  # transformers', where a file has no such key; null says that there is no window
FULL, SLIDING = "full_attention", "sliding_attention"


def in_all_layers(config: ModelConfig, layers: int) -> SlidingWindow | None:
    """`sliding_window` holds in every layer. Raises ConfigError for `layer_types`, which would be ignored."""
    if config.items("layer_types") or config.flag("use_sliding_window"):
        raise ConfigError(
            "`layer_types`, `use_sliding_window`: sliding-window attention in some layers is not supported in"
            " this family (`sliding_window` in all is; qwen2 and qwen3 have `layer_types`)"
        )
    size = _size(config)
    return SlidingWindow(size, tuple(range(layers))) if size else None


def in_all_layers_if_named(config: ModelConfig, layers: int) -> SlidingWindow | None:
    """As `in_all_layers`, but a file without the key has no window."""
    return in_all_layers(config, layers) if config.has("sliding_window") else None


def in_some_layers(config: ModelConfig, layers: int) -> SlidingWindow | None:
    """`sliding_window` holds with `use_sliding_window`, in the layers of `layer_types` that say so; without
    these in those from `max_window_layers` on.

    Raises:
        ConfigError: `layer_types` does not fit the layers, has another type, or asks for a window that is not
            there.
    """
    size = _size(config) if config.flag("use_sliding_window") else None
    if not config.items("layer_types"):
        first = _first(config)
        sliding = tuple(range(first, layers))
        return SlidingWindow(size, sliding) if size and sliding else None
    sliding = _sliding(config.items("layer_types"), layers)
    if sliding and size is None:
        raise ConfigError(
            "`layer_types` has sliding-window attention, and there is no window: `use_sliding_window` is not"
            " true, or `sliding_window` null"
        )
    return SlidingWindow(size, sliding) if size and sliding else None


def but_in_every(number: int, config: ModelConfig, layers: int) -> SlidingWindow | None:
    """`sliding_window` holds in the layers of `layer_types` that say so; without these in all but every
    `number`-th.

    Raises:
        ConfigError: `layer_types` does not fit the layers, has another type, or asks for a window that is not
            there.
    """
    types = config.items("layer_types") or [SLIDING if at % number else FULL for at in range(1, layers + 1)]
    sliding, size = _sliding(types, layers), _size(config)
    if sliding and size is None:
        raise ConfigError("`layer_types` has sliding-window attention, and `sliding_window` is null")
    return SlidingWindow(size, sliding) if size and sliding else None


def _sliding(types: list[Any], layers: int) -> tuple[int, ...]:
    """The numbers of the layers whose type says that they have a window."""
    unknown = next((kind for kind in types if kind not in (FULL, SLIDING)), None)
    if unknown is not None:
        raise ConfigError(f"`layer_types`: {unknown!r} is not supported ({FULL} and {SLIDING} are)")
    if len(types) != layers:
        raise ConfigError(f"`layer_types` has {len(types)} entries for {layers} layers")
    return tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)


def _size(config: ModelConfig) -> int | None:
    if "sliding_window" not in config.entries:
        return DEFAULT_SIZE
    return config.size("sliding_window") if config.has("sliding_window") else None


def _first(config: ModelConfig) -> int:
    """The first layer with a window; 0 is no size, but a layer's number."""
    if config.entries.get("max_window_layers") == 0:
        return 0
    return config.size("max_window_layers", 28, most=MAX_SIZE)
