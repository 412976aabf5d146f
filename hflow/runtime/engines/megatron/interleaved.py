"""A pipeline rank with several chunks of layers, between which lie those of the other ranks.

(Narayanan et al., arXiv:2104.04473, section 2.2.) Rank r of p holds chunks r, r + p, and so on. A pipeline
fills and drains in the time of a chunk per rank, not of all its layers; each micro-batch passes each rank
once per chunk. Megatron takes such a model as a list of models.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_model_config


class Interleaved(torch.nn.ModuleList):
    """This rank's chunks in the order of the forward pass, or what wraps each of them. They share one
    configuration."""

    @property
    def config(self) -> Any:
        """That of Megatron, which asks models for it."""
        return get_model_config(self[0])


def chunks_of(model: torch.nn.Module) -> list[Any]:
    """The chunks of a rank's part of a model; itself, where it is one."""
    return list(model) if isinstance(model, Interleaved) else [model]
