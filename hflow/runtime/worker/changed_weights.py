"""Of weights that go to another host, those alone that have changed since they went there last.

A sender keeps what it sent. It counts, bit by bit, how many elements of each message differ from that, and
tells the reader; then each message has the places and values of these, which the reader writes into what it
got before. A message that would not be shorter so has all elements, as the first ones do. With the changes
comes a checksum of all elements of the message, which those of the reader must have in the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.plan.edges import INDEX_BYTES
from hflow.plan.layout import Box
from hflow.runtime.element_bits import checksum, element_bits
from hflow.runtime.engines.protocol import Weights
from hflow.runtime.worker.route import Message, ParameterPart
from hflow.runtime.worker.world import Peers, World

CHANGED_WEIGHTS = "changed_weights"  # the metric of a reader: the share of its weights that was sent
CHECKSUM_BYTES = 8
_ALL = -1  # told in the place of a number of changes: the message has all elements


class WrongChecksum(Exception):  # noqa: N818  (it is what is wrong)
    """What a reader has got is not what was sent."""


class SentWeights:
    """What this rank has sent last over a weight edge, in the dtype in which it went.

    `changed` of `compared` elements differed in the last transfer.
    """

    def __init__(self) -> None:
        self.changed = self.compared = 0
        self._values: dict[str, tuple[Box, Tensor]] = {}

    def begin(self) -> None:
        """Another transfer begins."""
        self.changed = self.compared = 0

    @property
    def nbytes(self) -> int:
        """Of the copy."""
        return sum(values.nbytes for _, values in self._values.values())

    def has(self, message: Message) -> bool:
        return all(name in self._values for name, _ in message.parts)

    def flat(self, message: Message) -> Tensor:
        """The elements of a message, in one dimension."""
        return _joined(self._view(name, box).reshape(-1) for name, box in message.parts)

    def keep(self, messages: Iterable[Message], source: Weights, dtype: torch.dtype) -> None:
        """All that `source` has of the parameters in `messages`, which have been sent."""
        for name in dict.fromkeys(name for message in messages for name, _ in message.parts):
            box = source.box(name)
            values = source.view(name, box).reshape([stop - start for start, stop in box])
            if name in self._values:
                self._values[name][1].copy_(values)
            else:
                self._values[name] = box, values.to(dtype, copy=True)

    def _view(self, name: str, box: Box) -> Tensor:
        held, values = self._values[name]
        return values[tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(box, held))]


@dataclass(frozen=True)
class Changes:
    """The `number` of elements of a message, with weights of `dtype`, that differ from what was `sent`."""

    message: Message
    number: int
    dtype: torch.dtype
    sent: SentWeights

    def landing(self, device: torch.device) -> Tensor:
        """Where to receive them."""
        size = CHECKSUM_BYTES + self.number * (INDEX_BYTES + self.dtype.itemsize)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def packed(self, source: Weights) -> Tensor:
        """What to send: a checksum of all elements, then the places and the values of these."""
        values = _flat(source, self.message.parts).to(self.dtype)
        (places,) = torch.nonzero(_differ(values, self.sent.flat(self.message)), as_tuple=True)
        assert len(places) == self.number, "weights changed while they were sent"
        packed = self.landing(values.device)
        total, at, changed = self._parts(packed)
        total.fill_(checksum([values]))
        at.copy_(places)
        changed.copy_(values[places])
        return packed

    def unpack(self, arrived: Tensor, target: Weights) -> None:
        """Write them into the reader's weights.

        Raises:
            WrongChecksum: all elements of the message together are then not those of the sender.
        """
        total, places, changed = self._parts(arrived)
        values = _flat(target, self.message.parts).to(self.dtype)
        values[places.long()] = changed
        start = 0
        for name, box in self.message.parts:
            view = target.view(name, box)
            part = values[start : start + view.numel()].view(view.shape)
            if view.data_ptr() != part.data_ptr():
                view.copy_(part)
            start += view.numel()
        if checksum([_flat(target, self.message.parts).to(self.dtype)]) != int(total):
            names = ", ".join(dict.fromkeys(name for name, _ in self.message.parts))
            raise WrongChecksum(f"after its changes have been written, {names} differs from what was sent")

    def _parts(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Checksum, places and values, in their memory."""
        total, rest = packed[:CHECKSUM_BYTES], packed[CHECKSUM_BYTES:]
        places, values = rest.split([self.number * INDEX_BYTES, self.number * self.dtype.itemsize])
        return total.view(torch.int64), places.view(torch.int32), values.view(self.dtype)


def tell_changes(
    messages: Sequence[Message],
    source: Weights | None,
    sent: SentWeights,
    dtype: torch.dtype,
    world: World,
    peers: Peers,
) -> dict[Message, Changes]:
    """How many elements of each message have changed, where only these are sent; the sender tells the reader.

    Args:
        messages: those that go to this rank or come from it, in the order that both ends share.
        source: this rank's weights of the sender.
        dtype: in which weights are sent.
    """
    by_pair: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for message in messages:
        by_pair[message.source, message.target].append(message)
    going = [(pair, own) for pair, own in by_pair.items() if pair[0] == world.rank]
    coming = [(pair, own) for pair, own in by_pair.items() if pair[1] == world.rank]
    counts = {pair: [_count(m, source, sent, dtype) for m in own] for pair, own in going}
    told = [(pair[0], torch.empty(len(own), dtype=torch.int64, device=world.device)) for pair, own in coming]
    tell = ((pair[1], torch.tensor(counts[pair], device=world.device)) for pair, _ in going)
    for number in world.messages(told, tell, peers.group):
        counts[coming[number][0]] = told[number][1].tolist()
    return {
        message: Changes(message, count, dtype, sent)
        for pair, own in by_pair.items()
        for message, count in zip(own, counts[pair])
        if count != _ALL
    }


def _count(message: Message, source: Weights | None, sent: SentWeights, dtype: torch.dtype) -> int:
    if not sent.has(message):
        return _ALL
    assert source and message.size < 2**31, "a place has four bytes"
    values = _flat(source, message.parts).to(dtype)
    number = int(torch.count_nonzero(_differ(values, sent.flat(message))))
    sent.changed, sent.compared = sent.changed + number, sent.compared + message.size
    is_shorter = CHECKSUM_BYTES + number * (INDEX_BYTES + dtype.itemsize) < message.size * dtype.itemsize
    return number if is_shorter else _ALL


def _differ(one: Tensor, other: Tensor) -> Tensor:
    return element_bits(one) != element_bits(other)


def _flat(weights: Weights, parts: Sequence[ParameterPart]) -> Tensor:
    """The elements of some parts, in one dimension; of one that lies together its memory."""
    return _joined(weights.view(name, box).reshape(-1) for name, box in parts)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    found = list(parts)
    return found[0] if len(found) == 1 else torch.cat(found)
