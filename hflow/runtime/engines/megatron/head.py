"""Heads: the matrix that gives logits, and what critics, reward and cost models have instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from hflow.runtime.engines.megatron.interleaved import chunks_of
from hflow.runtime.engines.megatron.shaped_config import shape_of_model
from hflow.runtime.engines.megatron.soft_cap import soft_capped_


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


class DeferredHead(ColumnParallelLinear):
    """Megatron's output layer, which hands on the hidden states: whoever reads them decides how much of their
    product with the matrix is in memory at a time."""

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        return hidden, None

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """``[tokens, 1, vocab / tp]`` of ``[tokens, 1, hidden]``; the gradient of these is summed over tp."""
        return super().forward(hidden, weight)[0]


@dataclass(frozen=True)
class OutputMatrix:
    """`weight`: this rank's rows, ``[vocab / tp, hidden]``, which may be those of the embedding; `group`: the
    tensor-parallel group, over which they are split; `cap`: see `ModelShape.logit_cap`."""

    layer: DeferredHead
    weight: Tensor
    group: ProcessGroup
    cap: float | None = None

    @staticmethod
    def of(model: torch.nn.Module) -> OutputMatrix:
        """That of a last pipeline stage."""
        whole: Any = get_attr_wrapped_model(chunks_of(model)[-1], "output_layer", return_model_obj=True)
        layer, tied = whole.output_layer, whole.share_embeddings_and_output_weights
        weight = whole.shared_embedding_or_output_weight() if tied else layer.weight
        return OutputMatrix(layer, weight, layer.tp_group, shape_of_model(whole).logit_cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[tokens, vocab / tp]`` of ``[tokens, hidden]``, all of them."""
        return soft_capped_(self.layer.logits(hidden[:, None], self.weight), self.cap).squeeze(1)


def replace_output_layer(model: GPTModel, scalar: bool) -> None:
    """Put another head in the place of a last stage's: a scalar one of zeros (the output matrix must not be
    tied), or one that leaves the product to others."""
    layer: Any = model.output_layer
    if not scalar:
        # Megatron lets nobody choose its class; the layer stays, as others have marked its weight by now.
        layer.__class__ = DeferredHead
        return
    assert not model.share_embeddings_and_output_weights
    head: Any = ScalarHead(model.config.hidden_size, model.config.params_dtype)
    model.output_layer = head  # of the declared class Megatron uses no more than forward
