"""Keys and values of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.prefix import Prefix


@dataclass
class KeyValueCache:
    """Room for the tokens of a batch whose rows may be repeated and dropped.

    `layers`: of each its keys and its values, ``[rows, kv_heads / tp, length, d]``, of which the first `used`
    places are taken, the same for all rows. With a `prefix` they have what comes after it.
    """

    layers: list[tuple[Tensor, Tensor]]
    used: int = 0
    prefix: Prefix | None = None

    @property
    def tokens(self) -> int:
        """So far, of each row, with those of the prefix."""
        return self.used + (self.prefix.places if self.prefix else 0)

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the newest ``[rows, new, kv_heads / tp, d]`` behind the others. Returns all so far."""
        end = self.used + keys.shape[1]
        for memory, newest in zip(self.layers[layer], (keys, values)):
            memory[:, :, self.used : end] = newest.transpose(1, 2)
        all_keys, all_values = self.layers[layer]
        return all_keys[:, :, :end], all_values[:, :, :end]

    def put(self, layer: int, keys: Tensor, values: Tensor, at: Tensor, places: int) -> tuple[Tensor, Tensor]:
        """As `add`, of one token at the place `at`, int64 ``[1]``, which the host need not know. Returns what
        is in the first `places` places."""
        for memory, newest in zip(self.layers[layer], (keys, values)):
            memory.index_copy_(2, at, newest.transpose(1, 2))
        return self.first(layer, places)

    def first(self, layer: int, places: int) -> tuple[Tensor, Tensor]:
        """Keys and values in the first `places` places, whether these are taken or not."""
        keys, values = self.layers[layer]
        return keys[:, :, :places], values[:, :, :places]

    def advance(self, tokens: int) -> None:
        """Keep the `tokens` that every layer has added."""
        self.used += tokens

    def clear_rest(self) -> None:
        """Zeros in the places that are not taken: memory may hold NaN, which no mask makes a zero."""
        for memory in (m for layer in self.layers for m in layer):
            memory[:, :, self.used :] = 0

    def repeat(self, rows: Tensor, length: int) -> None:
        """Go on with the given rows (int64 ``[new rows]``), repetitions allowed, each with room for `length`
        tokens."""
        self.layers = [
            (self._repeated(keys, rows, length), self._repeated(values, rows, length))
            for keys, values in self.layers
        ]

    def share(self, rows: Tensor, present: Tensor | None, room: int) -> None:
        """Go on with the given rows (int64 ``[new rows]``), repetitions allowed, and room for so many more
        tokens. What is there becomes their prefix; `present`: see `Prefix`."""
        before = [(keys[:, :, : self.used], values[:, :, : self.used]) for keys, values in self.layers]
        self.prefix, self.used = Prefix.shared(before, present, rows), 0
        self.layers = [
            (self._room(keys, len(rows), room), self._room(values, len(rows), room))
            for keys, values in before
        ]

    def newest(self, layer: int) -> tuple[Tensor, Tensor]:
        """The next place of keys and of values, ``[rows, kv_heads / tp, d]``."""
        keys, values = self.layers[layer]
        return keys[:, :, self.used], values[:, :, self.used]

    def keep(self, rows: Tensor) -> Tensor:
        """Drop all but the given rows, int64 and ascending. Returns them in their new order.

        The last ones move to where others leave: what need not move is not copied.
        """
        kept = rows.clone()
        free = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        staying = rows < len(rows)
        free[rows[staying]] = False
        kept[rows[staying]], kept[free] = rows[staying], rows[~staying]
        holes = free.nonzero().squeeze(1)
        for memory in (m for layer in self.layers for m in layer):
            memory[holes, :, : self.used] = memory[rows[~staying], :, : self.used]
        self.layers = [(keys[: len(rows)], values[: len(rows)]) for keys, values in self.layers]
        if self.prefix:
            self.prefix.keep(kept)
        return kept

    def _room(self, memory: Tensor, rows: int, length: int) -> Tensor:
        return memory.new_empty(rows, memory.shape[1], length, memory.shape[3])

    def _repeated(self, memory: Tensor, rows: Tensor, length: int) -> Tensor:
        chosen = self._room(memory, len(rows), length)
        chosen[:, :, : self.used] = memory[rows, :, : self.used]
        return chosen
