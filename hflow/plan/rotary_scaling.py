"""How rotary positions are stretched beyond the lengths of pretraining. Names are those of config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log, sqrt
from typing import Annotated, Literal

from pydantic import Discriminator


@dataclass(frozen=True)
class LinearScaling:
    """Every position is divided by `factor`."""

    kind: Literal["linear"] = field(default="linear", kw_only=True)
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: waves longer than ``original_max_positions / low_freq_factor`` are stretched by `factor`,
    those shorter than ``original_max_positions / high_freq_factor`` not at all, and those between in part."""

    kind: Literal["llama3"] = field(default="llama3", kw_only=True)
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): dims that turn more than `beta_fast` times within `original_max_positions`
    stay as they are, those that turn less than `beta_slow` times are stretched by `factor`, and those between
    in part. With `truncate` these bounds are whole dims. Sines and cosines are multiplied by
    `attention_factor`.
    """

    kind: Literal["yarn"] = field(default="yarn", kw_only=True)
    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753) within the positions of pretraining: the angles of each pair of dims are
    divided by its own `factors`, and sines and cosines multiplied by `attention_factor`. `stretch`: how many
    times as many positions the model has in all."""

    kind: Literal["longrope"] = field(default="longrope", kw_only=True)
    factors: tuple[float, ...]
    original_max_positions: int
    stretch: float
    attention_factor: float


def longrope_attention_factor(stretch: float, original_max_positions: int) -> float:
    """By what LongRoPE multiplies sines and cosines (arXiv:2402.13753, section 3.3)."""
    return sqrt(1 + log(stretch) / log(original_max_positions)) if stretch > 1 else 1.0


def default_attention_factor(factor: float, weight: float = 1.0) -> float:
    """By what YaRN multiplies sines and cosines (arXiv:2309.00071, equation 22), to the power of `weight` in
    first order."""
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


RotaryScaling = Annotated[
    LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling, Discriminator("kind")
]
