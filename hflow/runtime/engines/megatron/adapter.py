"""Low-rank adapters (LoRA, arXiv:2106.09685) beside Megatron's parallel linear modules.

Megatron fuses projections; an adapter has matrices for each of them, as in PEFT, and adds what they make to
the fused output. Over tp only vectors as wide as the adapter's rank are summed: those behind A of a matrix
that is split by columns, and in the backward pass the gradients of those before B of one that is split by
rows. So the half that every rank of tp holds whole has the whole gradient on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.graph.adapter import Adapter, AdapterTarget
from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.megatron.dropout import column_draws, dropped_product, numbered
from hflow.runtime.engines.megatron.products import product, projected
from hflow.runtime.engines.megatron.tensor_parallel_part import into_parts, sum_of_parts

# The Megatron module of each projection, within a layer.
QKV, PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"
GATE_UP, DOWN = "mlp.linear_fc1", "mlp.linear_fc2"


class LowRank(torch.nn.Module):
    """A and B beside one projection of ``[..., columns]`` to ``[..., rows]``, of this rank's part. Its
    forward pass ends before B, with ``[..., rank]``."""

    def __init__(
        self,
        adapter: Adapter,
        rows: int,
        columns: int,
        split: int,
        like: Tensor,
        tp: ProcessGroup,
        matrix: int,
    ):
        """`split`: the dim of the projection that tp splits, and of which `rows` or `columns` are the part of
        this rank. `matrix`: the projection's number, by which dropout draws."""
        super().__init__()
        self.scale, self.by_rows, self.tp = adapter.scale, split == 0, tp
        self.dropout, self.matrix = adapter.dropout, matrix
        self.lora_A, self.lora_B = _Matrix(adapter.rank, columns, like), _Matrix(rows, adapter.rank, like)
        whole: Any = self.lora_A.weight if self.by_rows else self.lora_B.weight
        cut = self.lora_B.weight if self.by_rows else self.lora_A.weight
        set_tensor_model_parallel_attributes(cut, True, split, 1)
        whole.sequence_parallel = True  # Megatron then sums its gradients over tp, where places are split

    def forward(self, x: Tensor, sp: bool = False, draws: Tensor | None = None) -> Tensor:
        """`sp`: whether the input of a projection that is split by rows, or else its output, is this rank's
        part of the places. `draws`: the numbers of all places, where some of x is to be left out."""
        narrow = projected(x, self.lora_A.weight) if draws is None else self._dropped(x, sp, draws)
        # Before B of a projection that is split by rows, and behind A of one that is split by columns.
        return into_parts(narrow, self.tp, sp) if self.by_rows else sum_of_parts(narrow, self.tp, sp)

    def _dropped(self, x: Tensor, sp: bool, draws: Tensor) -> Tensor:
        first, count, rank = 0, x.shape[-1], self.tp.rank()
        if not self.by_rows:
            first = rank * count
        elif sp:
            draws = draws.chunk(self.tp.size())[rank]
        columns = column_draws(self.matrix, first, count, x.device)
        return dropped_product(x, self.lora_A.weight, draws, columns, self.dropout)


class _Matrix(torch.nn.Module):
    """With undefined values, of the dtype and on the device of `like`."""

    def __init__(self, rows: int, columns: int, like: Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_empty(rows, columns))


class FusedAdapter(torch.nn.Module):
    """The adapters of projections that are one matrix: `widths` of their outputs on this rank, by name.

    Where they are fused by query groups, each of `groups` has its part of every projection.
    """

    def __init__(
        self,
        adapter: Adapter,
        widths: dict[AdapterTarget, int],
        columns: int,
        split: int,
        groups: int,
        like: Tensor,
        tp: ProcessGroup,
        layer: int,
    ):
        super().__init__()
        self._widths: dict[str, int] = {**widths}
        self.groups, self.enabled = groups, True
        self.draws: Tensor | None = None  # of the places that the layer runs, while dropout is on
        for name, width in ((name, width) for name, width in widths.items() if name in adapter.targets):
            matrix = numbered(layer, name)
            self.add_module(name, LowRank(adapter, width, columns, split, like, tp, matrix))

    def forward(self, x: Tensor, found: Tensor, sp: bool = False) -> Tensor:
        """`found`, the output of the fused matrix for x, with what the adapters add: in its memory, but for
        one projection, whose output Megatron gives as a view that must not change."""
        found = found.clone() if len(self._widths) == 1 else found
        own: dict[str, Any] = dict(self.named_children())
        narrow = [low_rank(x, sp, self.draws) for low_rank in own.values()]
        sums = _Sums(self.groups, self._columns, next(iter(own.values())).scale)
        return _Added.apply(found, sums, *narrow, *(low_rank.lora_B.weight for low_rank in own.values()))

    @property
    def _columns(self) -> tuple[slice, ...]:
        """Of each adapter, within a group."""
        ends = list(accumulate(width // self.groups for width in self._widths.values()))
        places = zip(self._widths, [0, *ends], ends, strict=False)
        return tuple(slice(start, end) for name, start, end in places if name in self._modules)


@dataclass(frozen=True)
class _Sums:
    """Where products with B are added, and how often."""

    groups: int
    columns: tuple[slice, ...]
    scale: float

    def parts(self, fused: Tensor) -> Iterator[Tensor]:
        """Of each adapter, ``[..., groups, columns]``."""
        grouped = fused.unflatten(-1, (self.groups, -1))
        return (grouped[..., columns] for columns in self.columns)


class _Added(torch.autograd.Function):
    """found + scale * B narrow, for each adapter in its columns. Nothing as wide as `found` is made beside
    it, nor kept."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, sums: _Sums, *factors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*factors)
        ctx.sums, half = sums, len(factors) // 2
        for part, narrow, b in zip(sums.parts(found), factors[:half], factors[half:], strict=True):
            part.add_(projected(narrow, b).view(part.shape), alpha=sums.scale)
        ctx.mark_dirty(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        factors, sums = ctx.saved_tensors, ctx.sums
        half = len(factors) // 2
        of_narrow, of_b = list[Tensor](), list[Tensor]()
        for part, narrow, b in zip(sums.parts(gradient), factors[:half], factors[half:], strict=True):
            upstream = part.flatten(-2)
            of_narrow.append(product(upstream, b).mul_(sums.scale))
            of_b.append(product(upstream.flatten(0, -2).T, narrow.flatten(0, -2)).mul_(sums.scale))
        return gradient, None, *of_narrow, *of_b


def add_adapters(model: torch.nn.Module, shape: ModelShape, tp: ProcessGroup) -> None:
    """Beside all modules of the model's layers that its adapter changes."""
    layers: Any = getattr(model, "decoder").layers  # noqa: B009  (torch types it as a tensor or module)
    for layer in layers if shape.adapter else ():
        number = layer.layer_number - 1
        for path, widths, split, groups in _fused(shape, tp.size()):
            if shape.adapter and any(name in shape.adapter.targets for name in widths):
                _add(layer.get_submodule(path), shape.adapter, widths, split, groups, tp, number)


def adapted(module: Any, x: Tensor, found: Tensor, sp: bool = False) -> Tensor:
    """`found`, the output of a linear module for `x`, with what its adapter adds."""
    adapter: FusedAdapter | None = getattr(module, "adapter", None)
    return adapter(x, found, sp) if adapter is not None and adapter.enabled else found


@contextmanager
def dropping(layer: torch.nn.Module, draws: Tensor | None) -> Iterator[None]:
    """With dropout of what a layer's adapters read, by the numbers of the places that it runs; None: without.
    It ends with that run: sampling uses the same modules."""
    adapters = [module for module in layer.modules() if isinstance(module, FusedAdapter)]
    for adapter in adapters:
        adapter.draws = draws
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.draws = None


@contextmanager
def without_adapters(model: torch.nn.Module, disabled: bool) -> Iterator[None]:
    """The model's base, if `disabled`."""
    found = [module for module in model.modules() if isinstance(module, FusedAdapter)] if disabled else []
    for adapter in found:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.enabled = True


def _fused(shape: ModelShape, tp: int) -> Iterator[tuple[str, dict[AdapterTarget, int], int, int]]:
    """Of each fused module of a layer: where it is, the widths of its projections on a rank, which dim tp
    splits, and by how many groups they are fused."""
    pairs = shape.num_kv_heads * shape.kv_copies(tp) // tp
    qkv: dict[AdapterTarget, int] = {
        "q_proj": shape.query_width // tp, "k_proj": pairs * shape.head_dim, "v_proj": pairs * shape.head_dim,
    }  # fmt: skip
    yield QKV, qkv, 0, pairs
    yield PROJECTION, {"o_proj": shape.hidden}, 1, 1
    yield GATE_UP, {"gate_proj": shape.ffn // tp, "up_proj": shape.ffn // tp}, 0, 1
    yield DOWN, {"down_proj": shape.hidden}, 1, 1


def _add(
    module: torch.nn.Module,
    adapter: Adapter,
    widths: dict[AdapterTarget, int],
    split: int,
    groups: int,
    tp: ProcessGroup,
    layer: int,
) -> None:
    weight = module.get_parameter("weight")
    fused = FusedAdapter(adapter, widths, weight.shape[1], split, groups, weight, tp, layer)
    module.add_module("adapter", fused)
    module.register_forward_hook(_adding)


def _adding(module: Any, inputs: tuple[Tensor, ...], found: tuple[Tensor, Any]) -> Any:
    """Megatron's linear modules return their output and a bias that is left to others."""
    return adapted(module, inputs[0], found[0], module.sequence_parallel), found[1]
