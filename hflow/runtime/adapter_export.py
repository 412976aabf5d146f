"""A model with an adapter, in files: merged into one model, and the adapter by itself as PEFT reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hflow.graph.adapter import Adapter
from hflow.graph.ir import Model
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import LORA_A, LORA_B, SCALAR_HEAD
from hflow.plan.stored_adapter import PEFT_PREFIX

FOLDER = "adapter"  # beside the merged model


@dataclass
class AdapterExport:
    """What `merging` has seen of the adapter of `model`, for `write`."""

    model: Model
    adapter: Adapter
    _kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def merging(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """W + scale * B A in place of W, A and B; all else as it comes. Sums are of float32.

        Args:
            tensors: HF parameter names and values, A and B of an adapted matrix directly after it.
        """
        base: tuple[str, Tensor] | None = None
        for name, tensor in tensors:
            if name.endswith((LORA_A, LORA_B)):
                self._kept[PEFT_PREFIX + name] = tensor.detach().cpu().clone()
                if base and name.endswith(LORA_B):
                    base = base[0], self._merged(base[1], self._kept[_of_a(PEFT_PREFIX + name)], tensor)
                continue
            if base:
                yield base
            base = name, tensor
            if name == SCALAR_HEAD:
                self._kept[PEFT_PREFIX + name] = tensor.detach().cpu().clone()
        if base:
            yield base

    def write(self, folder: Path) -> None:
        """The adapter as a folder of PEFT's, in the model's `folder`."""
        target = folder / FOLDER
        target.mkdir()
        save_file(self._kept, target / "adapter_model.safetensors", metadata={"format": "pt"})
        scalar, alpha = self.model.head == "scalar", float(self.adapter.alpha)
        config = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM",
            "base_model_name_or_path": self.model.path,
            "r": self.adapter.rank,
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
            "lora_dropout": self.adapter.dropout,
            "target_modules": list(self.adapter.targets),
            "modules_to_save": ["score"] if scalar else None,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _merged(self, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        change = b.cpu().float() @ a.float()
        return torch.add(base.float(), change.to(base.device), alpha=self.adapter.scale).to(base.dtype)


def adapter_export(model: Model, shape: ModelShape) -> AdapterExport | None:
    """Of a model that has an adapter."""
    return AdapterExport(model, shape.adapter) if shape.adapter else None


def _of_a(b: str) -> str:
    return b.removesuffix(LORA_B) + LORA_A
