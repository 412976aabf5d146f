"""``config.json`` of a Hugging Face model folder: its values, each of the type that transformers gives it.

A text is no truth value, a truth value no number, and 2.0 no count: transformers writes none of these, and
they would be taken for something that their author did not mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hflow.bounded_read import read_json

CONFIG = "config.json"
MAX_BYTES = 16 * 2**20  # a classifier's file lists its labels
MAX_LAYERS = 10_000
MAX_EXPERTS = 1_000_000  # in all layers together
MAX_SIZE = 2**31 - 1


class ConfigError(ValueError):
    """What is wrong with ``config.json``, as one phrase."""


@dataclass(frozen=True)
class ModelConfig:
    """The entries of one JSON object. A key whose value is null counts as absent, as in transformers."""

    entries: Mapping[str, Any]

    def has(self, key: str) -> bool:
        return self.entries.get(key) is not None

    def value(self, key: str) -> Any:
        """Raises ConfigError when there is none."""
        if not self.has(key):
            raise ConfigError(f"there is no key {key!r}")
        return self.entries[key]

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A count from 1 to `most`. Raises ConfigError for anything else, and without value and default."""
        if default is not None and not self.has(key):
            return default
        found = self.value(key)
        if not _is_whole(found):
            raise ConfigError(f"`{key}` is {_shown(found)}, no whole number")
        if not 1 <= found <= most:
            raise ConfigError(f"`{key}` is {_shown(found)}, not between 1 and {most}")
        return found

    def flag(self, key: str) -> bool:
        """True or false, which is the default. Raises ConfigError for anything else."""
        found = self.entries.get(key)
        if found is not None and not isinstance(found, bool):
            raise ConfigError(f"`{key}` is {_shown(found)}, neither true nor false")
        return bool(found)

    def number(self, key: str, default: float, zero: bool = False) -> float:
        """A finite number above 0 (or, with `zero`, 0). Raises ConfigError for anything else."""
        found = self.value(key) if self.has(key) else default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ConfigError(f"`{key}` is {_shown(found)}, no number")
        try:
            number = float(found)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
            raise ConfigError(f"`{key}` is {_shown(found)}, no finite number above 0")
        return number

    def inner(self, key: str) -> ModelConfig:
        """The object under `key`, empty without one. Raises ConfigError for anything else."""
        found = self.entries.get(key)
        if found is not None and not isinstance(found, dict):
            raise ConfigError(f"{key} is no JSON object")
        return ModelConfig(cast("dict[str, Any]", found or {}))

    def items(self, key: str) -> list[Any]:
        """The list under `key`, empty without one. Raises ConfigError for anything else."""
        found = self.entries.get(key)
        if found is not None and not isinstance(found, list):
            raise ConfigError(f"`{key}` is {_shown(found)}, no list")
        return cast("list[Any]", found or [])

    def check_end(self, vocab: int) -> None:
        """Raises ConfigError when `eos_token_id`, a token or a list of them, is not within `vocab` tokens."""
        found = self.entries.get("eos_token_id")
        tokens = cast("list[Any]", found) if isinstance(found, list) else [] if found is None else [found]
        for token in tokens:
            if not _is_whole(token):
                raise ConfigError(f"`eos_token_id` is {_shown(found)}, no token and no list of tokens")
            if not 0 <= token < vocab:
                raise ConfigError(
                    f"`eos_token_id` {_shown(token)} is outside the vocabulary of {vocab} tokens"
                )


def read_config(file: Path) -> ModelConfig:
    """The entries of `file`.

    Raises:
        UnreadableError: when it is no regular file of at most MAX_BYTES, or no JSON.
        ConfigError: when it holds no JSON object.
    """
    found = read_json(file, MAX_BYTES)
    if not isinstance(found, dict):
        raise ConfigError("it is no JSON object")
    return ModelConfig(cast("dict[str, Any]", found))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value as it is written, cut short."""
    text = (
        repr(value)
        if not _is_whole(value) or abs(value) < 2**64
        else f"an integer of {value.bit_length()} bits"
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
