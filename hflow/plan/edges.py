"""Lowered edges: the layouts at both ends, and the copies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Discriminator

from hflow.graph.types import ValueType
from hflow.plan.layout import Box, Layout, Mesh
from hflow.plan.sharding import Sharding

INDEX_BYTES = 4  # of the place of a weight that is sent alone

# What copies amount to, for display; workers execute the copies.
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


@dataclass(frozen=True, kw_only=True)
class _Edge:
    """What all lowered edges have. Bytes per device are those of the busiest one; for ragged values they are
    estimates from the greatest lengths.

    Attributes:
        kind: what moves, in plan files.
        name: unique among the edges of a program.
        source: the node that the values come from.
        target: the node that reads them.
        collective: what the copies amount to; ``p2p`` where they are no single collective.
        copies: what goes from which device to which.
        size_bytes: of all values, each counted once.
        bytes_per_device: received.
        lower_bound_bytes_per_device: that must be received, however the values are moved.
        peak_bytes: held at both ends while the values move.
        time_s: predicted seconds.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    kind: str
    name: str
    source: str
    target: str
    collective: Collective
    copies: tuple[CopySet, ...]
    size_bytes: int
    bytes_per_device: int
    lower_bound_bytes_per_device: int
    peak_bytes: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class DataEdge(_Edge):
    """Rows of values that one node makes and another reads; boxes have one range, of rows.

    Attributes:
        ports: the producer's output ports.
        types: of the value of each port.
        source_layout: how the producer's devices hold the rows.
        target_layout: how the reader's devices need them.
    """

    kind: Literal["data"] = "data"
    ports: tuple[str, ...]
    types: tuple[ValueType, ...]
    source_layout: Layout
    target_layout: Layout

    @property
    def source_mesh(self) -> Mesh:
        return self.source_layout.mesh

    @property
    def target_mesh(self) -> Mesh:
        return self.target_layout.mesh


@dataclass(frozen=True, kw_only=True)
class WeightEdge(_Edge):
    """Weights that one node trains and another reads; boxes are those of HF parameters.

    Attributes:
        source_sharding: how the trainer's devices hold the weights.
        target_sharding: how the reader's devices need them.
        changed: the share of the weights that is expected to have changed since they were sent last: to
            another host these alone are sent, each with its place. None: all are sent.
    """

    kind: Literal["weights"] = "weights"
    source_sharding: Sharding
    target_sharding: Sharding
    changed: float | None = None

    @property
    def source_mesh(self) -> Mesh:
        return self.source_sharding.mesh

    @property
    def target_mesh(self) -> Mesh:
        return self.target_sharding.mesh


Edge = Annotated[DataEdge | WeightEdge, Discriminator("kind")]
