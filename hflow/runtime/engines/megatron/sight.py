"""Which of the tokens so far those see that a model reads next, and at which places these stand.

While a response grows so does what its tokens see. `GrowingSight` is made anew for each pass, with tensors as
long as what is seen. `StaticSight` keeps its shapes, and the place of the newest token is on the device: all
passes are the same operations, which CUDA can replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.attention import CHUNK, band
from hflow.runtime.engines.megatron.cache import KeyValueCache


@dataclass(frozen=True)
class GrowingSight:
    """Of `new` tokens from the place `start` on.

    Attributes:
        present: bool ``[rows, tokens so far]``, False where there is padding; None: no padding.
        mask: of a few tokens in layers without a window, for `attend`; None: causal, or of many, for which
            one mask would grow with the square of their number.
    """

    start: int
    new: int
    present: Tensor | None
    mask: Tensor | None

    @staticmethod
    def of(
        start: int, new: int, present: Tensor | None, windows: Sequence[int | None], like: Tensor
    ) -> GrowingSight:
        """With the mask that layers of these `windows` need, in the dtype of `like`: where there is padding,
        a layer sees all of it, and no turns are taken."""
        many = new > CHUNK or all(window is not None and window < new for window in windows)
        unmasked = present is None or new == 1 or many
        return GrowingSight(start, new, present, None if unmasked else band(None, new, 0, like, present))

    @property
    def takes_turns(self) -> bool:
        """Whether masks are made for some of the new tokens at a time."""
        return self.present is not None and self.new > CHUNK

    def turns(self, table: Tensor) -> Tensor:
        """The tokens' part of a rotary table, ``[new, d]``."""
        return table[self.start : self.start + self.new]

    def add(self, cache: KeyValueCache, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `KeyValueCache.add`."""
        return cache.add(layer, keys, values)

    def seen(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values that one new token sees, and which of them are no padding."""
        first = max(0, key.shape[2] - window) if window is not None else 0
        present = None if self.present is None else self.present[:, first:]
        return key[:, :, first:], value[:, :, first:], present


@dataclass(frozen=True)
class StaticSight:
    """Of one token at the place `at`, int64 ``[1]``, of which only the first `places` places are looked at.

    `present`: of each window that a layer has, bool ``[rows, places]``: what the token sees.
    """

    at: Tensor
    places: int
    present: Mapping[int | None, Tensor]

    @staticmethod
    def of(at: Tensor, present: Tensor, windows: Sequence[int | None]) -> StaticSight:
        """`present`: bool ``[rows, places]``, False where there is padding or no token yet."""
        places = torch.arange(present.shape[1], device=at.device)
        seen = {w: present if w is None else present & (places > at - w) for w in set(windows)}
        return StaticSight(at, present.shape[1], seen)

    def turns(self, table: Tensor) -> Tensor:
        """The token's part of a rotary table, ``[1, d]``."""
        return table.index_select(0, self.at)

    def add(self, cache: KeyValueCache, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `KeyValueCache.put`."""
        return cache.put(layer, keys, values, self.at, self.places)

    def seen(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of all places, and which of them the token sees."""
        return key, value, self.present[window]


Sight = GrowingSight | StaticSight
