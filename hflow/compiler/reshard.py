"""From a pair of layouts to the copies between them. This is what hflow has instead of protocols.

Both sides are given as boxes per device. The grid of all box boundaries (the common refinement,
arXiv:2211.05322) cuts the value into cells; a cell that a device already holds is an alias and costs
nothing; every other cell a device needs is received exactly once:

1. from a holder on its own host, the least loaded one;
2. if the host has none, one device of the host receives it from the least loaded holder elsewhere
   (phase 0) and passes it on inside the host (phase 1).

So the bytes a device receives are exactly |needed \\ held|, the lower bound, for any two layouts:
nested or not, on the same or on disjoint meshes. HybridFlow's zero-redundancy regrouping (section 5 of
arXiv:2409.19256) is the special case in which every device's source box lies inside its target box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product

import networkx as nx

from hflow.compiler.layout import Box, Range, intersect, volume
from hflow.compiler.plan import Collective, Copy

Boxes = Mapping[int, Box]


def lower(source: Boxes, target: Boxes, host: Callable[[int], int] = lambda device: 0) -> tuple[Copy, ...]:
    """The copies that turn `source` into `target`, in a deterministic order.

    Args:
        source: the box each device holds before; a region may be held by several devices.
        target: the box each device must hold afterwards.
        host: the host of a device.

    Raises:
        ValueError: when a needed cell is held by no device.
    """
    sent: dict[int, int] = defaultdict(int)
    parts: dict[tuple[int, int, int], list[Box]] = defaultdict(list)
    for cell, needers, holders in _cells(source, target):
        for sender, receiver, phase in _deliver(needers, holders, sent, host):
            sent[sender] += volume(cell)
            parts[phase, sender, receiver].append(cell)
    copies = [
        Copy(sender, receiver, box, phase)
        for (phase, sender, receiver), cells in parts.items()
        for box in merge(cells)
    ]
    return tuple(sorted(copies, key=lambda c: (c.phase, c.target, c.box, c.source)))


def _cells(source: Boxes, target: Boxes) -> Iterator[tuple[Box, list[int], list[int]]]:
    """Every cell that some device needs and lacks, with the devices that need and that hold it."""
    boxes = [box for box in (*source.values(), *target.values()) if volume(box)]
    if not boxes:
        return
    cuts = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(boxes[0]))]
    for cell in product(*(tuple(pairwise(c)) for c in cuts)):
        holders = [d for d, box in source.items() if contains(box, cell)]
        needers = [d for d, box in target.items() if contains(box, cell) and d not in holders]
        if needers and not holders:
            raise ValueError(f"no device holds {cell}")
        if needers:
            yield cell, needers, holders


def _deliver(
    needers: Sequence[int], holders: Sequence[int], sent: Mapping[int, int], host: Callable[[int], int]
) -> Iterator[tuple[int, int, int]]:
    """(sender, receiver, phase) for one cell."""
    by_host: dict[int, list[int]] = defaultdict(list)
    for device in needers:
        by_host[host(device)].append(device)
    extra: dict[int, int] = defaultdict(int)  # copies of this very cell, so that holders take turns
    for host_id, devices in by_host.items():
        local = [d for d in holders if host(d) == host_id]
        if local:
            yield from ((_least_loaded(local, sent, extra), device, 0) for device in devices)
        else:
            lead, *others = devices
            yield _least_loaded(holders, sent, extra), lead, 0
            yield from ((lead, device, 1) for device in others)


def _least_loaded(holders: Sequence[int], sent: Mapping[int, int], extra: dict[int, int]) -> int:
    choice = min(holders, key=lambda d: (extra[d], sent.get(d, 0), d))
    extra[choice] += 1
    return choice


def contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner))


def merge(cells: Iterable[Box]) -> list[Box]:
    """Join boxes that touch along one dim and agree in all others, until none do."""
    boxes = sorted(cells)
    for dim in range(len(boxes[0]) if boxes else 0):
        rows: dict[tuple[Range, ...], list[Range]] = defaultdict(list)
        for box in boxes:
            rows[box[:dim] + box[dim + 1 :]].append(box[dim])
        boxes = [
            rest[:dim] + (joined,) + rest[dim:] for rest, ranges in rows.items() for joined in _join(ranges)
        ]
    return sorted(boxes)


def _join(ranges: list[Range]) -> list[Range]:
    out: list[Range] = []
    for start, stop in sorted(ranges):
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def received(copies: Iterable[Copy]) -> dict[int, int]:
    """Elements received per device."""
    total: dict[int, int] = defaultdict(int)
    for copy in copies:
        total[copy.target] += volume(copy.box)
    return dict(total)


def lower_bound(source: Boxes, target: Boxes) -> dict[int, int]:
    """Elements per device that no lowering can avoid receiving: |needed \\ held|."""
    bound: dict[int, int] = {}
    for device, needed in target.items():
        held = intersect(needed, source[device]) if device in source else None
        bound[device] = volume(needed) - (volume(held) if held else 0)
    return bound


def recognise(copies: Sequence[Copy], source: Boxes, target: Boxes) -> Collective:
    """The collective that the copies are, if every connected set of devices runs the same one."""
    if not copies:
        return "alias"
    links: nx.Graph[int] = nx.Graph([(c.source, c.target) for c in copies])
    kinds: set[Collective] = set()
    for members in nx.connected_components(links):
        own = [c for c in copies if c.source in members]
        kinds.add(_kind(own, members, source, target))
    return kinds.pop() if len(kinds) == 1 else "p2p"


def _kind(copies: Sequence[Copy], members: set[int], source: Boxes, target: Boxes) -> Collective:
    senders, receivers = {c.source for c in copies}, {c.target for c in copies}
    pairs = {(c.source, c.target) for c in copies}
    complete = len(pairs) == len(members) * (len(members) - 1)
    one_size = len({volume(c.box) for c in copies}) == 1
    if any(c.phase for c in copies) or len(pairs) < len(copies):
        return "p2p"
    if complete and one_size and _gathers_all(copies, members, source, target):
        return "all_gather"
    if len(senders) == 1 and len({c.box for c in copies}) == 1:
        return "broadcast"
    if len(senders) == 1 and one_size:
        return "scatter"
    if len(receivers) == 1 and one_size:
        return "gather"
    return "all_to_all" if complete and one_size else "p2p"


def _gathers_all(copies: Sequence[Copy], members: set[int], source: Boxes, target: Boxes) -> bool:
    """Every member contributes its whole box and ends up with the same union of all boxes."""
    whole = all(c.box == source.get(c.source) for c in copies)
    return whole and len({target.get(d) for d in members}) == 1
