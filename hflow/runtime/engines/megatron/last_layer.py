"""The last layer, whose MLP runs only at the places that the head reads.

No token sees what another one's last MLP gives, and the head reads the places that predict response tokens.
So the tokens of prompts, but the last of each, need not pass through it, nor does a gradient come from there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hflow.runtime.engines.megatron.recompute import RecomputingLayer


class LastLayer(RecomputingLayer):
    """Gives the hidden states of the places that `TokenPlaces.read` names, ``[read, 1, hidden]``, if it names
    any."""

    def _forward_attention(self, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        hidden, context = super()._forward_attention(*args, **options)
        read = options["attention_mask"].read
        return (hidden if read is None else hidden.index_select(0, read)), context
