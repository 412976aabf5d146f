"""The router of a layer with experts: which of them each token passes through, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hflow.plan.model_shape import Experts
from hflow.runtime.engines.megatron.products import projected


@dataclass(frozen=True)
class Routing:
    """`experts`: int64 ``[tokens, top_k]``, most probable first. `weights`: float32 ``[tokens, top_k]``, by
    which what the experts give is summed, with a gradient to the router."""

    experts: Tensor
    weights: Tensor


class Router(torch.nn.Module):
    """Every token chooses the `top_k` experts of the greatest softmax probability (arXiv:1701.06538 without
    its noise); Mixtral's, Qwen3's and gpt-oss' divide the probabilities of the chosen ones by their sum.

    As in transformers, scores are made in the model's dtype and probabilities in float32: a choice hangs on
    their order. Each rank of tp has the whole router, and makes the same choice, or, with sequence
    parallelism, that of its part of the places.

    `tally`: while there is one, float64 ``[2, experts]``, choices and probabilities of tokens are added up in
    it. `slope`: while there is one, float32 ``[experts]``, the gradient of the loss with respect to each
    expert's probability, beside that of what the experts give. `recorded`: while it `records`, int64
    ``[tokens, top_k]``, what it chose for the tokens of the last pass.
    """

    def __init__(self, hidden: int, shape: Experts, dtype: torch.dtype, device: torch.device | int):
        super().__init__()
        self.shape = shape
        self.weight = torch.nn.Parameter(torch.empty(shape.num_experts, hidden, dtype=dtype, device=device))
        self.bias: torch.nn.Parameter | None = None
        if shape.biased:
            self.bias = torch.nn.Parameter(self.weight.new_empty(shape.num_experts))
        for parameter in self.parameters():
            # Of sequence parallelism: Megatron sums the gradients so marked over tp.
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        self.tally: Tensor | None = None
        self.slope: Tensor | None = None
        self.records = False
        self.recorded: Tensor | None = None

    def forward(self, tokens: Tensor, rows: Tensor | None = None, given: Tensor | None = None) -> Routing:
        """Of tokens ``[tokens, hidden]``.

        Args:
            rows: ``[tokens]``, how many rows have each, for the balancing loss.
            given: ``[tokens, top_k]``, the experts that tokens pass through instead of those of the greatest
                probability; where they are negative, these.
        """
        probabilities = projected(tokens, self.weight, self.bias).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.shape.top_k, dim=-1)
        if given is not None:
            experts = experts.where(given < 0, given.to(experts.dtype))
            weights = probabilities.gather(1, experts)
        if self.records:
            self.recorded = experts
        if self.shape.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.tally is not None:
            assert rows is not None
            self._count(experts, probabilities, rows)
        if self.slope is not None and torch.is_grad_enabled():
            assert rows is not None
            weights = _AlsoLearn.apply(weights, (probabilities @ self.slope) @ rows.float())
        return Routing(experts, weights)

    def _count(self, experts: Tensor, probabilities: Tensor, rows: Tensor) -> None:
        assert self.tally is not None
        each = rows.double()[:, None]
        self.tally[0].index_add_(0, experts.flatten(), each.expand_as(experts).flatten())
        self.tally[1] += (probabilities * each).sum(0)


class _AlsoLearn(torch.autograd.Function):
    """The weights as they are; the backward pass through them also takes a scalar's, as a summand of the
    loss. A stage of a pipeline has no other way to the loss."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, summand: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(summand)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (summand,) = ctx.saved_tensors
        return gradient, torch.ones_like(summand)
