"""From a pair of layouts to the copies between them. This is what hflow has instead of protocols.

Both sides are given as boxes per device. The grid of all box boundaries (the common refinement,
arXiv:2211.05322) cuts the value into cells; a cell that a device already holds is an alias and costs
nothing; every other cell a device needs is received exactly once:

1. from a holder on its own host, the least loaded one;
2. if the host has none, one device of the host receives it from the least loaded holder elsewhere
   (phase 0) and passes it on inside the host (phase 1).

So the bytes a device receives are exactly |needed \\ held|, the lower bound, for any two layouts:
nested or not, on the same or on disjoint meshes; and a host receives no byte twice, nor one that it holds.
HybridFlow's zero-redundancy regrouping (section 5 of arXiv:2409.19256) is the special case in which every
device's source box lies inside its target box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import product

from hflow.plan.edges import Collective, Copy
from hflow.plan.layout import Box, Range, intersect, volume

Boxes = Mapping[int, Box]
Host = Callable[[int], int]
At = tuple[int, ...]  # a cell: its number along every dim
Entry = tuple[int, int, int]  # what a device's host and the device have to send, and the device


@dataclass
class SendLoad:
    """Elements that devices send, and hosts to other hosts, in all lowerings that share this."""

    devices: dict[int, int] = field(default_factory=lambda: defaultdict[int, int](int))
    hosts: dict[int, int] = field(default_factory=lambda: defaultdict[int, int](int))


def lower(
    source: Boxes, target: Boxes, host: Host = lambda _: 0, load: SendLoad | None = None, weight: int = 1
) -> tuple[Copy, ...]:
    """The copies that turn `source` into `target`, in a deterministic order.

    Args:
        source: the box each device holds before; a region may be held by several devices.
        target: the box each device must hold afterwards.
        host: the host of a device.
        load: what devices already send; the copies are added to it.
        weight: how many tensors these copies are for.

    Raises:
        ValueError: when a needed cell is held by no device.
    """
    parts: dict[tuple[int, int, int], list[Box]] = defaultdict(list)
    senders: dict[tuple[int, ...], _Senders] = {}
    load = load or SendLoad()
    for cell, needers, holders in _cells(source, target):
        key = tuple(holders)
        if key not in senders:
            senders[key] = _Senders(holders, host, load)
        for sender, receiver, phase in senders[key].deliver(needers, volume(cell) * weight):
            parts[phase, receiver, sender].append(cell)
    return tuple(
        Copy(sender, receiver, box, phase)
        for phase, receiver, sender in sorted(parts)
        for box in merge(parts[phase, receiver, sender])
    )


def _cells(source: Boxes, target: Boxes) -> Iterator[tuple[Box, list[int], list[int]]]:
    """Every cell that some device needs and lacks, with the devices that need and that hold it."""
    sources, targets = by_box(source), by_box(target)
    boxes = {*sources, *targets}
    cuts = [sorted({edge for span in spans for edge in span}) for spans in zip(*boxes)]
    held, needed = _covers(sources, cuts), _covers(targets, cuts)
    for at in sorted(needed):
        own = held.get(at, [])
        needers = [d for box in needed[at] for d in targets[box] if source.get(d) not in own]
        cell = tuple((c[i], c[i + 1]) for c, i in zip(cuts, at))
        if needers and not own:
            raise ValueError(f"no device holds {cell}")
        if needers:
            yield cell, needers, [d for box in own for d in sources[box]]


def by_box(boxes: Boxes) -> dict[Box, list[int]]:
    """The devices that hold the same box; empty boxes are left out."""
    groups: dict[Box, list[int]] = defaultdict(list)
    for device, box in boxes.items():
        groups[box].append(device)
    return {box: devices for box, devices in groups.items() if volume(box)}


def _covers(boxes: Iterable[Box], cuts: Sequence[Sequence[int]]) -> dict[At, list[Box]]:
    """The boxes that each cell lies in; every boundary of a box is one of the cuts."""
    number = [{edge: i for i, edge in enumerate(c)} for c in cuts]
    found: dict[At, list[Box]] = defaultdict(list)
    for box in boxes:
        for at in product(*(range(n[start], n[stop]) for n, (start, stop) in zip(number, box))):
            found[at].append(box)
    return found


class _Senders:
    """The devices that hold some cells, by host; of each choice the least loaded one sends."""

    def __init__(self, holders: Iterable[int], host: Host, load: SendLoad):
        self.host, self.load = host, load
        self.local: dict[int, list[Entry]] = defaultdict(list)
        for device in holders:
            self.local[host(device)].append(self._entry(device))
        self.all = [entry for entries in self.local.values() for entry in entries]
        for entries in (self.all, *self.local.values()):
            heapify(entries)

    def deliver(self, needers: Iterable[int], size: int) -> Iterator[tuple[int, int, int]]:
        """(sender, receiver, phase) of the copies of one cell of `size` elements."""
        by_host: dict[int, list[int]] = defaultdict(list)
        for device in needers:
            by_host[self.host(device)].append(device)
        for host, devices in by_host.items():
            if host in self.local:
                yield from ((self._least_loaded(self.local[host], size), device, 0) for device in devices)
                continue
            sent = self.load.devices
            lead = min(devices, key=lambda d: (sent[d], d)) if len(devices) > 1 else devices[0]
            sender = self._least_loaded(self.all, size)
            self.load.hosts[self.host(sender)] += size
            yield sender, lead, 0
            sent[lead] += size * (len(devices) - 1)
            yield from ((lead, device, 1) for device in devices if device != lead)

    def _entry(self, device: int) -> Entry:
        return self.load.hosts[self.host(device)], self.load.devices[device], device

    def _least_loaded(self, heap: list[Entry], size: int) -> int:
        """The device that sends `size` elements more. Entries may be out of date, but loads only grow: the
        first one that is not is the least."""
        while (entry := self._entry(heap[0][2])) != heap[0]:
            heapreplace(heap, entry)
        self.load.devices[entry[2]] += size
        return entry[2]


def merge(cells: Iterable[Box]) -> list[Box]:
    """Join boxes that touch along one dim and agree in all others, until none do."""
    boxes = sorted(cells)
    for dim in range(len(boxes[0]) if len(boxes) > 1 else 0):
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
    sizes: dict[tuple[Box, Box | None], int] = {}  # of few distinct pairs of boxes
    bound: dict[int, int] = {}
    for device, needed in target.items():
        held = source.get(device)
        if (needed, held) not in sizes:
            own = intersect(needed, held) if held else None
            sizes[needed, held] = volume(needed) - (volume(own) if own else 0)
        bound[device] = sizes[needed, held]
    return bound


def volumes(boxes: Boxes) -> dict[int, int]:
    """Elements per device."""
    sizes = {box: volume(box) for box in set(boxes.values())}
    return {device: sizes[box] for device, box in boxes.items()}


def recognise(copies: Sequence[Copy], source: Boxes, target: Boxes) -> Collective:
    """The collective that the copies are, if every connected set of devices runs the same one."""
    if not copies:
        return "alias"
    if any(c.phase for c in copies):
        return "p2p"
    kinds: set[Collective] = {_kind(own, source, target) for own in _connected(copies)}
    return kinds.pop() if len(kinds) == 1 else "p2p"


def _connected(copies: Sequence[Copy]) -> Iterable[list[Copy]]:
    """The copies between each connected set of devices (union-find)."""
    parent = {d: d for c in copies for d in (c.source, c.target)}

    def root(device: int) -> int:
        while parent[device] != device:
            parent[device] = parent[parent[device]]
            device = parent[device]
        return device

    for copy in copies:
        parent[root(copy.target)] = root(copy.source)
    found: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        found[root(copy.source)].append(copy)
    return found.values()


def _kind(copies: Sequence[Copy], source: Boxes, target: Boxes) -> Collective:
    senders, receivers = {c.source for c in copies}, {c.target for c in copies}
    pairs, members = {(c.source, c.target) for c in copies}, senders | receivers
    complete = len(pairs) == len(members) * (len(members) - 1)
    one_size = len({volume(c.box) for c in copies}) == 1
    if len(pairs) < len(copies):
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
