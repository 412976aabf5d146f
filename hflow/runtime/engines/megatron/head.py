"""The head of critics, reward and cost models: one number per position."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn.functional import linear


class ScalarHead(torch.nn.Module):
    """A row of weights, whole on every tensor-parallel rank, behind the interface of Megatron's output layer.

    The ranks of a tensor-parallel group hold the same hidden states, and each computes the same loss from
    the same values. So each has the whole gradient of the hidden states, and the same gradient of the
    weights, without communication; Megatron counts replicated weights once in the gradient's norm.
    """

    def __init__(self, hidden: int, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """float32 values ``[..., 1]`` of hidden states ``[..., hidden]``, and Megatron's absent bias."""
        return linear(hidden.float(), self.weight.float()), None


def replace_output_layer(model: GPTModel) -> None:
    """Put a scalar head of zeros in the place of a last stage's output matrix, which must not be tied."""
    assert not model.share_embeddings_and_output_weights
    head: Any = ScalarHead(model.config.hidden_size, model.config.params_dtype)
    model.output_layer = head  # of the declared class Megatron uses no more than forward
