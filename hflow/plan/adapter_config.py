"""``adapter_config.json`` of a PEFT folder: the adapter that it describes, or the key that says more than an
adapter of hflow can be."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any, cast

from hflow.graph.adapter import ADAPTER_TARGETS, Adapter, AdapterTarget
from hflow.plan.digests import ADAPTER_CONFIG
from hflow.plan.model_config import ConfigError, ModelConfig, read_config

_HEADS = ("score", "classifier")  # what PEFT saves whole of a classifier, under whichever name it has one

_READ = ("peft_type", "r", "lora_alpha", "target_modules", "modules_to_save", "bias", "use_rslora",
         "init_lora_weights")  # fmt: skip
# Where the adapter came from, how it was trained, and options of what is switched on by other keys.
_OF_NO_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config",
)  # fmt: skip
_DEFAULT = 8  # of rank and alpha, where a file says none
# Ways to begin that leave the base as it is. All others take something from it.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


def read_adapter_config(folder: Path, dropout: float) -> Adapter:
    """The adapter in `folder`, of which an input is left out with probability `dropout` while it is trained.

    Rank-stabilised scaling, alpha / sqrt(rank), is that of an alpha which is sqrt(rank) times as large.

    Raises:
        UnreadableError: the file cannot be read.
        ConfigError: it describes no adapter as hflow has them.
    """
    config = read_config(folder / ADAPTER_CONFIG)
    kind = config.entries.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"`peft_type` is {kind!r}; adapters are LORA")
    for key, value in config.entries.items():
        if value and key not in (*_READ, *_OF_NO_EFFECT):
            raise ConfigError(f"`{key}` is {_brief(value)}, which adapters do not have")
    _check_start(config)
    if config.entries.get("bias", "none") != "none":
        raise ConfigError(f"`bias` is {_brief(config.entries['bias'])}; adapters have none")
    saved = _names(config, "modules_to_save")
    if other := next((name for name in saved if name not in _HEADS), None):
        raise ConfigError(f"`modules_to_save` has {other!r}; beside an adapter only a scalar head is trained")
    rank, alpha = config.size("r", _DEFAULT), config.number("lora_alpha", _DEFAULT)
    if config.flag("use_rslora"):
        alpha *= sqrt(rank)
    return Adapter(rank, alpha, _targets(config), dropout)


def _check_start(config: ModelConfig) -> None:
    start = config.entries.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise ConfigError(f"`init_lora_weights` is {_brief(start)}: its adapters change their base as well")


def _targets(config: ModelConfig) -> tuple[AdapterTarget, ...]:
    """In the order of the forward pass. A module that is named with its layer counts as its kind: whether all
    layers have one is seen from the matrices."""
    named = _names(config, "target_modules")
    kinds = {name.rpartition(".")[2] for name in named}
    if other := next((name for name in named if name.rpartition(".")[2] not in ADAPTER_TARGETS), None):
        known = ", ".join(ADAPTER_TARGETS)
        raise ConfigError(f"`target_modules` has {other!r}; adapters are of {known}")
    if not kinds:
        raise ConfigError("`target_modules` names no module")
    return tuple(target for target in ADAPTER_TARGETS if target in kinds)


def _names(config: ModelConfig, key: str) -> list[str]:
    found: Any = config.entries.get(key) or []
    if isinstance(found, str):
        raise ConfigError(f"`{key}` is the pattern {found!r}; a list of modules is read")
    if not isinstance(found, list) or not all(isinstance(name, str) for name in cast("list[Any]", found)):
        raise ConfigError(f"`{key}` is {_brief(found)}, no list of names")
    return cast("list[str]", found)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
