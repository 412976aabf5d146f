"""Recompute: keep a layer's input only, and repeat its forward pass before its backward pass.

(Chen et al., arXiv:1604.06174.) Megatron's own recomputation keeps the states of CUDA's random numbers for
each layer. No layer of hflow's has a state of that kind (see `dropout`), so torch's does, and also runs
without CUDA.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint

from hflow.runtime.engines.megatron.adapter import dropping


class RecomputingLayer(TransformerLayer):
    """A layer that forgets what it has computed, where `recompute` says so."""

    config: Any  # a `ShapedConfig`
    recompute = False

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        # Megatron turns gradients on where a layer adds up, also in a forward pass alone: norms there would
        # keep the activations of all layers.
        self.bias_dropout_add_exec_handler = nullcontext

    def forward(self, *args: Any, **options: Any) -> Any:
        # Routers are told of their tokens in the place of a padding mask, which Megatron would split itself.
        options["padding_mask"] = options["attention_mask"].routed
        if not (self.recompute and torch.is_grad_enabled()):
            return self._run(*args, **options)
        return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=False, **options)

    def _run(self, *args: Any, **options: Any) -> Any:
        """With dropout by the numbers of its places: before it is repeated, others may have passed."""
        adapter = self.config.shape.adapter
        if adapter is None or not adapter.dropout:
            return super().forward(*args, **options)
        with dropping(self, options["attention_mask"].pack.draws):
            return super().forward(*args, **options)


def set_recompute(model: torch.nn.Module, recompute: bool) -> None:
    """For all layers of a model."""
    for module in model.modules():
        if isinstance(module, RecomputingLayer):
            module.recompute = recompute
