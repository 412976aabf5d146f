"""The router of a layer with experts: which of them each token passes through, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from hflow.plan.model_shape import Experts


@dataclass(frozen=True)
class Routing:
    """`experts`: int64 ``[tokens, top_k]``, most probable first. `weights`: float32 ``[tokens, top_k]``, by
    which what the experts give is summed, with a gradient to the router."""

    experts: Tensor
    weights: Tensor


class Router(torch.nn.Module):
    """Every token chooses the `top_k` experts of the greatest softmax probability (arXiv:1701.06538 without
    its noise); Mixtral's and Qwen3's divide the probabilities of the chosen ones by their sum.

    As in transformers, scores are made in the model's dtype and probabilities in float32: a choice hangs on
    their order. Each rank of tp has the whole router, and makes the same choice.
    """

    def __init__(self, hidden: int, shape: Experts, dtype: torch.dtype, device: torch.device | int):
        super().__init__()
        self.shape = shape
        self.weight = torch.nn.Parameter(torch.empty(shape.num_experts, hidden, dtype=dtype, device=device))

    def forward(self, tokens: Tensor) -> Routing:
        """Of tokens ``[tokens, hidden]``."""
        probabilities = linear(tokens, self.weight).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.shape.top_k, dim=-1)
        if self.shape.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights)
