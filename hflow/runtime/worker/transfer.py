"""Execute data edges: rows go from store to store.

Which ranks exchange which rows is in the plan. How long rows are is known only now: lengths
travel first (their number is in the plan), then all values in one message per pair of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.graph.types import ValueType
from hflow.plan.edges import Copy, DataEdge
from hflow.plan.layout import Range
from hflow.plan.samples import is_whole_text
from hflow.runtime.rows import TORCH_DTYPES, Rows, concatenate
from hflow.runtime.worker.staleness import versions
from hflow.runtime.worker.world import Peers, World

TOLD_BYTES = 8  # of a number that is told ahead


@dataclass(frozen=True)
class Received:
    """Bytes that came from other workers: of values, and what is `told` ahead of them."""

    values: int = 0
    told: int = 0

    def __add__(self, other: Received) -> Received:
        return Received(self.values + other.values, self.told + other.told)


def move_rows(
    edge: DataEdge, ports: Sequence[str], held: Mapping[str, Rows], world: World, peers: Peers
) -> tuple[dict[str, Rows], Received]:
    """Run a data edge.

    Args:
        ports: those of the edge's ports that move; the others lie right already.
        held: this rank's rows of these ports; empty when it is not in the source layout.

    Returns:
        The rows this rank needs, by port (empty when it is not in the target), and what it received.
    """
    types = dict(zip(edge.ports, edge.types))
    num_rows = edge.types[0].rows
    source, target = (lay.boxes((num_rows,)) for lay in (edge.source_layout, edge.target_layout))
    pieces: dict[str, dict[Range, Rows]] = {p: {} for p in ports}
    if world.rank in source:
        pieces = {p: {source[world.rank][0]: held[p]} for p in ports}
    copies = edge.copies[0].copies if edge.copies else ()
    received = Received()
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
) -> Received:
    """One phase: every copy's rows of all ports; what arrives is added to `pieces`."""
    outgoing = {
        peer: [c.box[0] for c in copies if (c.source, c.target) == (world.rank, peer)] for peer in peers.ranks
    }
    incoming = {
        peer: [c.box[0] for c in copies if (c.source, c.target) == (peer, world.rank)] for peer in peers.ranks
    }
    told = _told(pieces, types)
    cut = {
        peer: {p: [_cut(pieces[p], r) for r in ranges] for p in pieces} for peer, ranges in outgoing.items()
    }
    heads = world.exchange(
        [
            _flat([read(rows) for p, read in told for rows in cut[peer][p]], torch.int64)
            for peer in peers.ranks
        ],
        [len(told) * sum(b - a for a, b in incoming[peer]) for peer in peers.ranks],
        peers.group,
    )
    arriving = {peer: _split_heads(found, told, incoming[peer]) for peer, found in zip(peers.ranks, heads)}
    values = world.exchange(
        [_flat([_bytes(rows) for p in pieces for rows in cut[peer][p]], torch.uint8) for peer in peers.ranks],
        [_num_bytes(pieces, types, incoming[peer], arriving[peer]) for peer in peers.ranks],
        peers.group,
    )
    for peer, data in zip(peers.ranks, values):
        _unpack(data, pieces, types, incoming[peer], arriving[peer])
    return Received(sum(map(len, values)), TOLD_BYTES * sum(map(len, heads)))


Told = list[tuple[str, Callable[[Rows], Tensor]]]
Arriving = dict[tuple[str, Callable[[Rows], Tensor], Range], Tensor]


def _told(ports: Iterable[str], types: Mapping[str, ValueType]) -> Told:
    """What is sent ahead, a number per row: lengths of ragged rows, versions of texts."""
    ragged: Told = [(p, _lengths) for p in ports if types[p].ragged or types[p].dtype == "str"]
    return ragged + [(p, versions) for p in ports if is_whole_text(types[p])]


def _split_heads(found: Tensor, told: Told, ranges: Sequence[Range]) -> Arriving:
    keys = [(p, read, r) for p, read in told for r in ranges]
    parts = found.split([b - a for *_, (a, b) in keys]) if keys else ()
    return dict(zip(keys, parts))


def _count(port: str, span: Range, arriving: Arriving) -> int:
    lengths = arriving.get((port, _lengths, span))
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
            lengths, ages = (arriving.get((port, read, span)) for read in (_lengths, versions))
            pieces[port][span] = Rows(values, lengths, ages)
            at += size


def _lengths(rows: Rows) -> Tensor:
    return rows.row_lengths


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
