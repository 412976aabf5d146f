"""Execute weight edges: parts of HF parameters go from the engine that trains them to those that read them.

Neighbours, who can read each other's memory, copy parts from storage to storage. Between others, a part
that lies together in memory is sent from where it lies and received where it belongs. What does not (columns,
small parts that share a message, another dtype) is copied once, at that end only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from hflow.plan.edges import WeightEdge
from hflow.runtime.engines.protocol import AveragedWeights, ModelWeights, Weights
from hflow.runtime.worker.changed_weights import Changes, SentWeights, tell_changes
from hflow.runtime.worker.cross_memory import RowsInMemory, place
from hflow.runtime.worker.route import Message, ParameterPart, Phase, Round, Route
from hflow.runtime.worker.transfer import TOLD_BYTES, Received
from hflow.runtime.worker.world import Peers, World


def move_weights(
    route: Route,
    source: Weights | None,
    target: Weights | None,
    dtype: torch.dtype,
    world: World,
    peers: Peers,
    sent: SentWeights | None = None,
) -> Received:
    """Refresh `target` (this rank's reader) from all ranks' `source`, of `dtype`.

    Args:
        sent: over this edge, last; all of its ranks give it or none. Only weights that have changed since
            then are sent, which readers pass on whole.
    """
    staging = _Staging(route.staging, dtype, world.device)
    kept = _keep(route.own, source, target)
    received = Received()
    for phase in route.phases:
        holder = target if phase.relay else source
        if phase.reads:
            _read(phase, holder, target, staging, world, peers, kept)
            received += Received(sum(m.size for m in phase.reads if m.target == world.rank) * dtype.itemsize)
        if sent and not phase.relay:
            messages = [*phase.messages()]
            changes = tell_changes(messages, source, sent, dtype, world, peers)
            received += Received(told=TOLD_BYTES * sum(m.target == world.rank for m in messages))
        else:
            changes = {}
        for round_ in phase.rounds:
            received += _exchange(round_, holder, target, staging, changes, world, peers, kept)
        if sent and source and not phase.relay:
            sent.keep((m for m in phase.messages() if m.source == world.rank), source, dtype)
    deque(kept, 0)  # where nothing has travelled
    if target:
        target.changed = True
    return received


def _exchange(
    round_: Round,
    holder: Weights | None,
    target: Weights | None,
    staging: _Staging,
    changes: Mapping[Message, Changes],
    world: World,
    peers: Peers,
    kept: Iterator[tuple[int, Tensor]],
) -> Received:
    """The messages of a round; of those in `changes` only these."""

    def flat(message: Message) -> Tensor:
        if message not in changes:
            return staging.flat(message, holder)
        assert holder
        return changes[message].packed(holder)

    staging.used = 0
    coming = [m for m in round_.messages if m.target == world.rank]
    receives = [
        (m.source, changes[m].landing(world.device) if m in changes else staging.landing(m, target))
        for m in coming
    ]
    sends = ((m.target, flat(m)) for m in round_.messages if m.source == world.rank)
    for number in world.messages(receives, chain(sends, kept), peers.group):
        message, (_, arrived) = coming[number], receives[number]
        if target and message in changes:
            changes[message].unpack(arrived, target)
        else:
            _unpack(message, arrived, target)
    return Received(sum(arrived.nbytes for _, arrived in receives))


def _read(
    phase: Phase,
    holder: Weights | None,
    target: Weights | None,
    staging: _Staging,
    world: World,
    peers: Peers,
    kept: Iterator[tuple[int, Tensor]],
) -> None:
    """Holders tell where their weights lie; readers copy them, and tell when they have."""
    mine = [m for m in phase.reads if m.target == world.rank]
    others = [m for m in phase.reads if m.source == world.rank]
    told = [(m.source, torch.empty(len(m.parts), 2, dtype=torch.int64)) for m in mine]
    wire = None if phase.relay else staging.dtype  # what is relayed is of the targets' dtype
    tell = ((m.target, _places(m, holder, wire)) for m in others)
    for number in world.messages(told, chain(tell, kept), peers.group):
        _copy(mine[number], told[number][1], target, phase.relay, staging, world)
    over = [(m.target, torch.empty(1)) for m in others]
    deque(world.messages(over, ((m.source, torch.zeros(1)) for m in mine), peers.group), 0)


def _places(message: Message, holder: Weights | None, dtype: torch.dtype | None) -> Tensor:
    """Where the parts lie, which must be of `dtype`: the reader takes bytes as they are."""
    assert holder
    views = [holder.view(name, box) for name, box in message.parts]
    assert all(view.dtype == (dtype or view.dtype) for view in views), f"not all weights are {dtype}"
    return torch.tensor([place(view) for view in views])


def _copy(
    message: Message, told: Tensor, target: Weights | None, relay: bool, staging: _Staging, world: World
) -> None:
    assert target
    views = [target.view(name, box) for name, box in message.parts]
    places: list[RowsInMemory] = [(address, pitch) for address, pitch in told.tolist()]
    if relay or all(view.dtype == staging.dtype for view in views):  # what is relayed is a target's already
        world.read(message.source, places, views)
        return
    for place_, view in zip(places, views):
        staging.used = 0
        part = staging.take(view.numel()).view(view.shape)
        world.read(message.source, [place_], [part])
        view.copy_(part)


def tell_version(
    edge: WeightEdge,
    source: ModelWeights | AveragedWeights | None,
    target: ModelWeights | None,
    world: World,
    peers: Peers,
) -> None:
    """Along a weight edge: the version of the weights that moved, from the first of the trainer's devices."""
    teller = edge.source_mesh.devices[0]
    told = torch.tensor([source.version] if source and world.rank == teller else [], dtype=torch.int64)
    readers = set(edge.target_mesh.devices)
    heard = world.exchange(
        [told.to(world.device) if rank in readers else told[:0].to(world.device) for rank in peers.ranks],
        [int(target is not None and rank == teller) for rank in peers.ranks],
        peers.group,
    )
    if target:
        target.version = int(heard[peers.ranks.index(teller)])


@dataclass
class _Staging:
    """Memory of `size` elements for what cannot be sent or received where it lies; one for all rounds, since
    fresh memory costs as much as a copy."""

    size: int
    dtype: torch.dtype
    device: torch.device
    used: int = 0

    @cached_property
    def memory(self) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=self.device)

    def flat(self, message: Message, weights: Weights | None) -> Tensor:
        """What to send, in one dimension."""
        found = self._in_place(message, weights)
        if found is None:
            found = self.take(message.size)
            for view, part in _split(message, found, weights):
                part.copy_(view)
        return found

    def landing(self, message: Message, weights: Weights | None) -> Tensor:
        """Where to receive, in one dimension."""
        found = self._in_place(message, weights)
        return self.take(message.size) if found is None else found

    def _in_place(self, message: Message, weights: Weights | None) -> Tensor | None:
        """The part itself, where there is but one and it lies together."""
        if len(message.parts) != 1:
            return None
        assert weights
        ((name, box),) = message.parts
        view = weights.view(name, box)
        return view.view(-1) if view.is_contiguous() and view.dtype == self.dtype else None

    def take(self, size: int) -> Tensor:
        self.used += size
        return self.memory[self.used - size : self.used]


def _keep(
    own: tuple[ParameterPart, ...], source: Weights | None, target: Weights | None
) -> Iterator[tuple[int, Tensor]]:
    """Copy what this rank holds already. No messages come of it: it is done while those before it travel."""
    for name, box in own:
        assert source and target
        to, values = target.view(name, box), source.view(name, box)
        to.copy_(values if values.shape == to.shape else values.reshape(to.shape))
    yield from ()


def _unpack(message: Message, arrived: Tensor, weights: Weights | None) -> None:
    for view, part in _split(message, arrived, weights):
        if view.data_ptr() != part.data_ptr():
            view.copy_(part)


def _split(message: Message, flat: Tensor, weights: Weights | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Every part's memory, and its values in `flat`, in the same shape."""
    assert weights
    at = 0
    for name, box in message.parts:
        view = weights.view(name, box)
        yield view, flat[at : at + view.numel()].view(view.shape)
        at += view.numel()
