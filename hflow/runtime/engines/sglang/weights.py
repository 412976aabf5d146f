"""The weights of a model that SGLang serves, as the worker on the same device renews them.

They arrive in buckets, so that beside SGLang's own copy only one bucket lies on the device. A copy of each
stays in the host's memory: with it a server that died is started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hflow.plan.frozen import moved_parameters
from hflow.plan.layout import Box, volume
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import weight_boxes
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.protocol import ModelWeights
from hflow.runtime.engines.sglang.room import make_room
from hflow.runtime.engines.sglang.tiles import header, tile

BUCKET_ELEMENTS = 2**27


def buckets(shape: ModelShape, tp: int) -> tuple[tuple[str, ...], ...]:
    """The names of the parameters that a renewal brings, cut so that a rank of `tp` holds no more than
    BUCKET_ELEMENTS of a bucket, or one parameter. Every rank of an edge cuts alike."""
    found: list[list[str]] = [[]]
    size = 0
    for parameter in moved_parameters(shape):
        share = parameter.size // parameter.parts(tp)
        if found[-1] and size + share > BUCKET_ELEMENTS:
            found.append([])
            size = 0
        found[-1].append(parameter.name)
        size += share
    return tuple(map(tuple, found))


class Taker(Protocol):
    """What takes the weights over: the server of a replica, as one of its ranks reaches it. `holds`: those
    that it was given last; None if it was given none since it started."""

    holds: ServedWeights | None

    def revive(self) -> bool: ...

    def begin(self) -> None: ...

    def take(self, header: str, flat: Tensor, version: str) -> None:
        """Collective over the replica; the memory may be used anew afterwards."""
        ...

    def end(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Bucket:
    """Parameters of which this rank holds `boxes`, one after the other in one buffer."""

    def __init__(self, boxes: dict[str, Box], shape: ModelShape, tp: int, dtype: torch.dtype):
        self.boxes = boxes
        self.tiles = [tile(name, _lengths(box), shape, tp) for name, box in boxes.items()]
        self.dtype = dtype
        self.memory: Tensor | None = None  # on the device, or, between updates, in the host's memory
        ends = torch.tensor([0, *(volume(box) for box in boxes.values())]).cumsum(0).tolist()
        self._starts = dict(zip(boxes, ends))
        self.size = ends[-1]

    def allocate(self, device: torch.device, keeps_values: bool) -> None:
        if keeps_values and self.memory is not None:
            self.memory = self.memory.to(device)
        elif self.memory is None or self.memory.device != device:
            self.memory = torch.empty(self.size, dtype=self.dtype, device=device)

    def view(self, name: str, box: Box) -> Tensor:
        assert self.memory is not None, f"no memory for `{name}`"
        held, start = self.boxes[name], self._starts[name]
        whole = self.memory[start : start + volume(held)].view(_lengths(held))
        return whole[tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(box, held))]


class ServedWeights(ModelWeights):
    """What a server serves.

    A renewal is ``allocate``, then for each bucket writing into its views and ``hand_over``.
    """

    def __init__(
        self,
        shape: ModelShape,
        sharding: Sharding,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        taker: Taker,
    ):
        boxes = ((p.name, weight_boxes(shape, sharding, p).get(rank)) for p in moved_parameters(shape))
        held = {name: box for name, box in boxes if box}
        self.changed, self.version, self.present = False, 0, True
        self.renewed = False  # ever: until then the server has what it read from the model's folder
        self.device, self.taker = device, taker
        self.buckets = [
            Bucket({name: held[name] for name in names if name in held}, shape, sharding.mesh.tp, dtype)
            for names in buckets(shape, sharding.mesh.tp)
        ]
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.boxes}
        self._next, self._keeps_values = 0, False

    def names(self) -> Sequence[str]:
        return tuple(self._bucket_of)

    def box(self, name: str) -> Box:
        return self._bucket_of[name].boxes[name]

    def view(self, name: str, box: Box) -> Tensor:
        return self._bucket_of[name].view(name, box)

    def allocate(self, keeps_values: bool = False) -> None:
        """Begin a renewal: wake the server, or start it again, and make room for the first bucket. Values
        that are kept come from the host's memory; before the first renewal there are none."""
        make_room(self.device)
        if not self.taker.revive() and not self.present:
            self.taker.wake()
        self.present = True
        self.taker.begin()
        self._next, self._keeps_values = 0, keeps_values
        self.buckets[0].allocate(self.device, keeps_values)

    def hand_over(self) -> None:
        """Give the bucket that has been written to the server, and make room for the next."""
        self._give(self.buckets[self._next])
        self._next += 1
        if self._next < len(self.buckets):
            self.buckets[self._next].allocate(self.device, self._keeps_values)
            return
        self._end()
        self.renewed = True

    def serve(self) -> None:
        """Give the server these weights again if it holds others."""
        if self.taker.holds not in (None, self):
            self.restore()

    def restore(self) -> None:
        """Give the server the weights of the last renewal. It has been started again, or holds others.

        Before the first renewal those are the weights in the model's folder: nothing has been trained yet, so
        that any others are the same.
        """
        if not self.renewed:
            assert self.taker.holds is None or self.taker.holds.version == self.version
            return
        self.taker.begin()
        for bucket in self.buckets:
            assert bucket.memory is not None
            bucket.memory = bucket.memory.to(self.device)
            self._give(bucket)
        self._end()

    def release(self) -> None:
        """Put the server to sleep, where it can: its weights and its KV cache give their memory back. So does
        the copy in the host's memory: the next renewal brings another."""
        self.taker.sleep()
        self.present = False
        for bucket in self.buckets:
            bucket.memory = None

    def _end(self) -> None:
        self.taker.end()
        self.taker.holds = self

    def _give(self, bucket: Bucket) -> None:
        assert bucket.memory is not None
        last = bucket is self.buckets[-1]
        self.taker.take(header(bucket.tiles, bucket.memory), bucket.memory, str(self.version) if last else "")
        bucket.memory = bucket.memory.cpu()


def _lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
