"""Lowered edges: the layouts at both ends, and the copies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hflow.graph.types import ValueType
from hflow.plan.layout import Box, Layout, Mesh
from hflow.plan.sharding import Sharding

Collective = Literal["alias", "all_gather", "broadcast", "scatter", "gather", "all_to_all", "p2p"]


@dataclass(frozen=True)
class Copy:
    """`box` of a tensor (global indices) goes from device `source` to device `target`.

    `phase` orders relays: a copy of phase 1 sends what its source received in phase 0.
    """

    source: int
    target: int
    box: Box
    phase: int = 0


@dataclass(frozen=True)
class CopySet:
    """The same copies for several tensors of one shape (e.g. one weight of every layer)."""

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    collective: Collective
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class EdgePlan:
    """A lowered edge: the layouts at both ends and the copies between them.

    Data edges copy rows: their boxes have one range, of rows. Weight edges copy boxes of HF
    parameters, between two shardings. `bytes_per_device` is what the busiest device receives; for ragged
    values it is an estimate from the greatest lengths.
    """

    name: str
    kind: Literal["data", "weights"]
    source: str
    target: str
    ports: tuple[str, ...]
    types: tuple[ValueType, ...]
    source_mesh: Mesh
    target_mesh: Mesh
    source_layout: Layout | None
    target_layout: Layout | None
    collective: Collective
    copies: tuple[CopySet, ...]
    size_bytes: int
    bytes_per_device: int
    lower_bound_bytes_per_device: int
    peak_bytes: int
    time_s: float
    source_sharding: Sharding | None = None
    target_sharding: Sharding | None = None
