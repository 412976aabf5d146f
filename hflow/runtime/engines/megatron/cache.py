"""Keys and values of the tokens so far, in the form of a Megatron inference context."""

from __future__ import annotations

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

    def select(self, rows: Tensor) -> None:
        """Go on with the given rows (int64 ``[new rows]``); repetitions allowed."""
        layers = self.key_value_memory_dict
        for layer, (keys, values) in layers.items():
            layers[layer] = (self._select(keys, rows), self._select(values, rows))

    def _select(self, memory: Tensor, rows: Tensor) -> Tensor:
        # memory [length, rows, kv_heads / tp, d]
        chosen = memory.new_empty(memory.shape[0], len(rows), *memory.shape[2:])
        used = self.sequence_len_offset
        chosen[:used] = memory[:used].index_select(1, rows)
        return chosen
