"""A model's adapter (LoRA, arXiv:2106.09685) inside of an SGLang server.

SGLang serves many adapters at once, and chooses among them row by row, by kernels for CUDA or through pinned
memory. A server of hflow has one, which all rows use and which new weights change under way. So A and B are
parameters beside the weights of SGLang's linear modules, and are renewed as those are (`tiles`).
"""

# SGLang is installed on demand
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from hflow.graph.adapter import Adapter, AdapterTarget

# SGLang's linear modules, by the ends of their names: the projections that each of them holds.
PROJECTIONS: dict[str, tuple[AdapterTarget, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}


def run_adapted(adapter: Adapter, run_scheduler: Callable[..., None], *given: Any) -> None:
    """SGLang's `run_scheduler_process` for one rank, whose model gets an adapter once it is loaded."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    load_model = ModelRunner.load_model

    def load_and_adapt(self: ModelRunner) -> None:
        load_model(self)
        add_served_adapter(self.model, adapter)

    ModelRunner.load_model = load_and_adapt
    run_scheduler(*given)


def add_served_adapter(model: torch.nn.Module, adapter: Adapter) -> None:
    """To all linear modules of SGLang's `model` that `adapter` changes; A and B are zeros."""
    for name, module in [*model.named_modules()]:
        projections = PROJECTIONS.get(name.rpartition(".")[2], ())
        if any(projection in adapter.targets for projection in projections):
            _add(module, adapter, projections)


class ServedAdapter(torch.nn.Module):
    """Of a linear module: A and B of its projections, of this rank's part, by name.

    Args:
        widths: of the outputs of all its projections on this rank, in their order.
        like: its weight.
    """

    def __init__(self, adapter: Adapter, widths: dict[AdapterTarget, int], like: Tensor):
        super().__init__()
        self.scale, self._widths = adapter.scale, widths
        for name, width in ((name, width) for name, width in widths.items() if name in adapter.targets):
            a, b = _zeros(adapter.rank, like.shape[1], like), _zeros(width, adapter.rank, like)
            pair = {"lora_A": a, "lora_B": b}
            self.add_module(name, torch.nn.ModuleDict(pair))

    def forward(self, x: Tensor) -> Tensor:
        """scale * B A x, ``[tokens, columns]`` to ``[tokens, rows]``, with zeros for projections that have no
        adapter."""
        parts = [*self._parts(x)]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _parts(self, x: Tensor) -> Iterator[Tensor]:
        for name, width in self._widths.items():
            pair: Any = self._modules.get(name)
            if pair is None:
                yield x.new_zeros(*x.shape[:-1], width)
            else:
                yield linear(linear(x, pair["lora_A"].weight), pair["lora_B"].weight) * self.scale


def _add(module: Any, adapter: Adapter, projections: tuple[AdapterTarget, ...]) -> None:
    """Beside the matrix product of `module`, which SGLang calls a method of its quantisation. Where tp splits
    the module by columns, SGLang sums what that gives over tp, and so these parts of the adapter's output."""
    whole = len(projections) == 1
    sizes = [module.weight.shape[0]] if whole else module.output_partition_sizes
    module.adapter = ServedAdapter(adapter, dict(zip(projections, sizes, strict=True)), module.weight)
    method = module.quant_method
    method.apply = partial(_apply, method.apply)


def _apply(apply: Callable[..., Tensor], layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return apply(layer, x, bias) + layer.adapter(x)


def _zeros(rows: int, columns: int, like: Tensor) -> torch.nn.Module:
    made = torch.nn.Module()
    weight = torch.nn.Parameter(like.new_zeros(rows, columns), requires_grad=False)
    made.register_parameter("weight", weight)
    return made
