"""Keys and values of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KeyValueCache:
    """Room for the tokens of a batch whose rows may be repeated and dropped.

    `layers`: of each its keys and its values, ``[rows, kv_heads / tp, length, d]``, of which the first `used`
    places are taken, the same for all rows.
    """

    layers: list[tuple[Tensor, Tensor]]
    used: int = 0

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

    def repeat(self, rows: Tensor) -> None:
        """Go on with the given rows (int64 ``[new rows]``), repetitions allowed."""
        self.layers = [
            (self._repeated(keys, rows), self._repeated(values, rows)) for keys, values in self.layers
        ]

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
        return kept

    def _repeated(self, memory: Tensor, rows: Tensor) -> Tensor:
        chosen = memory.new_empty(len(rows), *memory.shape[1:])
        chosen[:, :, : self.used] = memory[rows, :, : self.used]
        return chosen
