"""Keys and values of the tokens so far, in the form of a Megatron inference context."""

from __future__ import annotations

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor


class KeyValueCache(StaticInferenceContext):
    """Room for `length` tokens of a batch whose rows may be repeated and dropped.

    Megatron's attention writes new tokens at `sequence_len_offset`, the same for all rows, and reads
    everything before.
    """

    def __init__(self, rows: int, length: int):
        super().__init__(rows, length)

    def advance(self, tokens: int) -> None:
        """Keep the `tokens` written last."""
        self.sequence_len_offset += tokens
        self.enable_decode_mode()

    def repeat(self, rows: Tensor) -> None:
        """Go on with the given rows (int64 ``[new rows]``), repetitions allowed."""
        layers = self.key_value_memory_dict
        for layer, memories in layers.items():
            layers[layer] = tuple(self._repeated(memory, rows) for memory in memories)

    def keep(self, rows: Tensor) -> Tensor:
        """Drop all but the given rows, int64 and ascending. Returns them in their new order.

        The last ones move to where others leave: what need not move is not copied.
        """
        kept = rows.clone()
        free = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        staying = rows < len(rows)
        free[rows[staying]] = False
        kept[rows[staying]], kept[free] = rows[staying], rows[~staying]
        holes, used = free.nonzero().squeeze(1), self.sequence_len_offset
        layers = self.key_value_memory_dict
        for layer, memories in layers.items():
            for memory in memories:
                memory[:used, holes] = memory[:used, rows[~staying]]
            layers[layer] = tuple(memory[:, : len(rows)] for memory in memories)
        return kept

    def _repeated(self, memory: Tensor, rows: Tensor) -> Tensor:
        # memory [length, rows, kv_heads / tp, d]
        chosen = memory.new_empty(memory.shape[0], len(rows), *memory.shape[2:])
        used = self.sequence_len_offset
        chosen[:used] = memory[:used].index_select(1, rows)
        return chosen
