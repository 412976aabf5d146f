"""Execute lowered edges: rows from store to store, weights from engine to engine.

Which ranks exchange what is in the plan. For rows, how long they are is known only now: lengths
travel first (their number is in the plan), then all values in one message per pair of workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hflow.compiler.layout import Box, Range, intersect, volume
from hflow.compiler.plan import Copy, CopySet, EdgePlan
from hflow.compiler.shape import ModelShape
from hflow.compiler.weights import parameters, weight_boxes
from hflow.graph.types import ValueType
from hflow.runtime.engines.base import Weights
from hflow.runtime.rows import TORCH_DTYPES, Rows, concatenate
from hflow.runtime.worker.world import World

BUCKET_ELEMENTS = 16 * 2**20


@dataclass(frozen=True)
class Peers:
    """The ranks of one exchange and their process group (ranks ascending)."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup

    @staticmethod
    def of(edge: EdgePlan, group: Callable[[tuple[int, ...]], dist.ProcessGroup]) -> Peers:
        ranks = tuple(sorted({*edge.source_mesh.devices, *edge.target_mesh.devices}))
        return Peers(ranks, group(ranks))


def move_rows(
    edge: EdgePlan, ports: Sequence[str], held: Mapping[str, Rows], world: World, peers: Peers
) -> tuple[dict[str, Rows], int]:
    """Run a data edge.

    Args:
        ports: those of the edge's ports that move; the others lie right already.
        held: this rank's rows of these ports; empty when it is not in the source layout.

    Returns:
        The rows this rank needs, by port (empty when it is not in the target), and bytes received.
    """
    assert edge.source_layout and edge.target_layout
    types = dict(zip(edge.ports, edge.types))
    num_rows = edge.types[0].rows
    source, target = (lay.boxes((num_rows,)) for lay in (edge.source_layout, edge.target_layout))
    pieces: dict[str, dict[Range, Rows]] = {p: {} for p in ports}
    if world.rank in source:
        pieces = {p: {source[world.rank][0]: held[p]} for p in ports}
    copies = edge.copies[0].copies if edge.copies else ()
    received = 0
    for phase in sorted({c.phase for c in copies}):
        received += _exchange_rows([c for c in copies if c.phase == phase], pieces, types, world, peers)
    if world.rank not in target:
        return {}, received
    return {p: _cut(pieces[p], target[world.rank][0]) for p in ports}, received


def _exchange_rows(
    copies: Sequence[Copy],
    pieces: dict[str, dict[Range, Rows]],
    types: Mapping[str, ValueType],
    world: World,
    peers: Peers,
) -> int:
    """One phase: every copy's rows of all ports; what arrives is added to `pieces`."""
    outgoing = {
        peer: [c.box[0] for c in copies if (c.source, c.target) == (world.rank, peer)] for peer in peers.ranks
    }
    incoming = {
        peer: [c.box[0] for c in copies if (c.source, c.target) == (peer, world.rank)] for peer in peers.ranks
    }
    ragged = [p for p in pieces if types[p].ragged or types[p].dtype == "str"]
    cut = {
        peer: {p: [_cut(pieces[p], r) for r in ranges] for p in pieces} for peer, ranges in outgoing.items()
    }
    lengths = world.exchange(
        [
            _flat([_lengths(rows) for p in ragged for rows in cut[peer][p]], torch.int64)
            for peer in peers.ranks
        ],
        [len(ragged) * sum(b - a for a, b in incoming[peer]) for peer in peers.ranks],
        peers.group,
    )
    arriving = {
        peer: _split_lengths(found, ragged, incoming[peer]) for peer, found in zip(peers.ranks, lengths)
    }
    values = world.exchange(
        [_flat([_bytes(rows) for p in pieces for rows in cut[peer][p]], torch.uint8) for peer in peers.ranks],
        [_num_bytes(pieces, types, incoming[peer], arriving[peer]) for peer in peers.ranks],
        peers.group,
    )
    for peer, data in zip(peers.ranks, values):
        _unpack(data, pieces, types, incoming[peer], arriving[peer])
    return sum(len(v) for v in values) + 8 * sum(len(v) for v in lengths)


Arriving = dict[tuple[str, Range], Tensor]


def _split_lengths(found: Tensor, ragged: Sequence[str], ranges: Sequence[Range]) -> Arriving:
    keys = [(p, r) for p in ragged for r in ranges]
    parts = found.split([b - a for _, (a, b) in keys]) if keys else ()
    return dict(zip(keys, parts))


def _count(port: str, span: Range, arriving: Arriving) -> int:
    lengths = arriving.get((port, span))
    return span[1] - span[0] if lengths is None else int(lengths.sum())


def _num_bytes(
    ports: Mapping[str, object], types: Mapping[str, ValueType], ranges: Sequence[Range], arriving: Arriving
) -> int:
    return sum(
        TORCH_DTYPES[types[p].dtype].itemsize * _count(p, span, arriving) for p in ports for span in ranges
    )


def _unpack(
    data: Tensor,
    pieces: dict[str, dict[Range, Rows]],
    types: Mapping[str, ValueType],
    ranges: Sequence[Range],
    arriving: Arriving,
) -> None:
    at = 0
    for port in pieces:
        dtype = TORCH_DTYPES[types[port].dtype]
        for span in ranges:
            size = dtype.itemsize * _count(port, span, arriving)
            values = data[at : at + size].clone().view(dtype)
            pieces[port][span] = Rows(values, arriving.get((port, span)))
            at += size


def _lengths(rows: Rows) -> Tensor:
    assert rows.lengths is not None
    return rows.lengths


def _bytes(rows: Rows) -> Tensor:
    return rows.values.contiguous().view(torch.uint8)


def _flat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype)


def _cut(pieces: Mapping[Range, Rows], span: Range) -> Rows:
    """Rows [span) put together from the pieces that hold them, each row once."""
    parts: list[Rows] = []
    at = span[0]
    for (start, stop), rows in sorted(pieces.items(), key=lambda item: item[0]):
        if start <= at < stop and at < span[1]:
            end = min(stop, span[1])
            parts.append(rows.slice(at - start, end - start))
            at = end
    assert at == span[1], f"rows {at}-{span[1]} are missing"
    return parts[0] if len(parts) == 1 else concatenate(parts)


def move_weights(
    edge: EdgePlan,
    shape: ModelShape,
    source: Weights | None,
    target: Weights | None,
    dtype: torch.dtype,
    world: World,
    peers: Peers,
) -> int:
    """Run a weight edge: refresh `target` (this rank's reader) from all ranks' `source`.

    Returns:
        Bytes received.
    """
    if source and target:
        _keep_own(edge, shape, source, target, world.rank)
    return copy_weights(edge.copies, source, target, dtype, world, peers)


def _keep_own(edge: EdgePlan, shape: ModelShape, source: Weights, target: Weights, rank: int) -> None:
    """What this rank holds already goes straight into the reader's weights."""
    assert edge.source_sharding and edge.target_sharding
    for parameter in parameters(shape):
        held = weight_boxes(shape, edge.source_sharding, parameter).get(rank)
        needed = weight_boxes(shape, edge.target_sharding, parameter).get(rank)
        own = intersect(held, needed) if held and needed else None
        if own:
            target.write(parameter.name, own, source.read(parameter.name, own))


def copy_weights(
    sets: Sequence[CopySet],
    source: Weights | None,
    target: Weights | None,
    dtype: torch.dtype,
    world: World,
    peers: Peers,
) -> int:
    """Perform lowered copies of HF parameters in buckets, one exchange each. Returns bytes received."""
    received = 0
    for bucket in _buckets([(name, c) for s in sets for name in s.tensors for c in s.copies]):
        mine = [(name, c) for name, c in bucket if world.rank in (c.source, c.target)]
        sends: dict[int, list[Tensor]] = defaultdict(list)
        comes: dict[int, list[tuple[str, Box]]] = defaultdict(list)
        for name, copy in mine:
            if copy.source == world.rank:
                holder = source if copy.phase == 0 else target
                assert holder
                sends[copy.target].append(holder.read(name, copy.box).reshape(-1))
            else:
                comes[copy.source].append((name, copy.box))
        parts = world.exchange(
            [
                torch.cat(sends[r]) if sends[r] else torch.empty(0, dtype=dtype, device=world.device)
                for r in peers.ranks
            ],
            [sum(volume(box) for _, box in comes[r]) for r in peers.ranks],
            peers.group,
        )
        for rank, part in zip(peers.ranks, parts):
            _write(target, comes[rank], part)
        received += sum(len(p) for p in parts) * dtype.itemsize
    return received


def _buckets(copies: Sequence[tuple[str, Copy]]) -> list[list[tuple[str, Copy]]]:
    """Copies in plan order, phase by phase, cut so that no bucket is much over BUCKET_ELEMENTS."""
    out: list[list[tuple[str, Copy]]] = []
    filled, phase = 0, -1
    for name, copy in sorted(copies, key=lambda item: item[1].phase):
        if not out or filled > BUCKET_ELEMENTS or copy.phase != phase:
            out.append([])
            filled, phase = 0, copy.phase
        out[-1].append((name, copy))
        filled += volume(copy.box)
    return out


def _write(target: Weights | None, comes: Sequence[tuple[str, Box]], part: Tensor) -> None:
    at = 0
    for name, box in comes:
        assert target
        size = volume(box)
        target.write(name, box, part[at : at + size].view([stop - start for start, stop in box]))
        at += size
