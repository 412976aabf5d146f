"""Which matrices of a model an adapter changes, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

AdapterTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTER_TARGETS: tuple[AdapterTarget, ...] = get_args(AdapterTarget)


@dataclass(frozen=True)
class Adapter:
    """Low-rank adaptation (LoRA, arXiv:2106.09685) of a model's matrices.

    Each matrix W named in `targets` acts as W + alpha / rank * B A. A has `rank` rows and B as many columns;
    they are trained, and all else is frozen but for a scalar head. A begins at random, B with zeros. While it
    is trained, each input of A is left out with probability `dropout`.
    """

    rank: int
    alpha: float
    targets: tuple[AdapterTarget, ...]
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter whose matrices, rank, alpha and targets are those in a folder of PEFT's. What a graph says
    of them again is what the folder must say; None: nothing. `dropout`: as of an `Adapter`."""

    path: str
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[AdapterTarget, ...] | None = None
    dropout: float = 0.0


AnyAdapter = StoredAdapter | Adapter
