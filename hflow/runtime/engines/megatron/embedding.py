"""An embedding that is multiplied by the root of its width (arXiv:1706.03762, section 3.4)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor

from hflow.plan.model_shape import ModelShape


class ScaledEmbedding(LanguageModelEmbedding):
    """Megatron's, times `embedding_factor`."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        config: Any = self.config
        return super().forward(*args, **options) * embedding_factor(config.shape, config.params_dtype)


def embedding_factor(shape: ModelShape, dtype: torch.dtype) -> float:
    """Rounded to the model's dtype, as transformers does; 1 where nothing is multiplied."""
    return torch.tensor(shape.hidden**0.5, dtype=dtype).item() if shape.scaled_embedding else 1.0
