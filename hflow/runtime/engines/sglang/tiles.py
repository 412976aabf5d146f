"""Parts of HF parameters on their way into an SGLang process, as one buffer and a header that describes it.

A worker fills the buffer with what the rank of SGLang on its device shall hold, and no more: SGLang's own
loading wants whole parameters on every rank and cuts them itself. So the header speaks of SGLang's fused
parameters, and `load_tiles` runs inside SGLang as its custom weight loader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from hflow.plan.model_shape import ModelShape
from hflow.runtime.element_bits import checksum
from hflow.runtime.engines.sglang.adapter import PROJECTIONS

LOADER = f"{__name__}.load_tiles"
OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
UP, DOWN = ("up_proj", "w3"), ("down_proj", "w2")


@dataclass(frozen=True)
class Tile:
    """Rows of SGLang's `parameter`, from row `start` of its first or second `half` on, of this shape; of one
    that holds those of all experts, of this `expert`'s.

    SGLang may have wider ones, filled up with zeros: it rounds the width of an MLP up on some devices.
    """

    parameter: str
    start: int
    shape: tuple[int, ...]
    half: Literal[0, 1] = 0
    expert: int | None = None

    @property
    def size(self) -> int:
        return prod(self.shape)


def tile(name: str, part: tuple[int, ...], shape: ModelShape, tp: int) -> Tile:
    """Where SGLang keeps the part, of shape `part`, that a rank of `tp` holds of an HF parameter."""
    head, _, kind = name.rpartition(".")
    block, _, module = head.rpartition(".")
    heads = shape.num_heads, shape.num_kv_heads * shape.kv_copies(tp)
    queries, pairs = (count * shape.head_dim // tp for count in heads)
    if module in ("lora_A", "lora_B"):
        outer, _, projection = block.rpartition(".")
        holder = next((name for name, held in PROJECTIONS.items() if projection in held), projection)
        return Tile(f"{outer}.{holder}.adapter.{projection}.{module}.{kind}", 0, part)
    fused = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", queries),
        "v_proj": ("qkv_proj", queries + pairs),
    }
    if module in fused:
        inner, start = fused[module]
        return Tile(f"{block}.{inner}.{kind}", start, part)
    if found := OF_EXPERT.fullmatch(head):
        experts, number, own = found.groups()
        half = 1 if own in UP else 0
        return Tile(f"{experts}.{'w2' if own in DOWN else 'w13'}_{kind}", 0, part, half, int(number))
    if module in ("gate_proj", "up_proj"):
        return Tile(f"{block}.gate_up_proj.{kind}", 0, part, 1 if module == "up_proj" else 0)
    return Tile(name, 0, part)


def header(tiles: Sequence[Tile], flat: Tensor) -> str:
    """What describes `flat`, in which the tiles lie one after the other."""
    return json.dumps({"tiles": [asdict(tile) for tile in tiles], "checksum": checksum([flat])})


def load_tiles(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write buffers into a model of SGLang, named by their headers; called by SGLang.

    Raises:
        ValueError: a tile does not fit, or what was read back is not what was sent.
    """
    parameters = dict(model.named_parameters())
    for text, flat in named_tensors:
        told = json.loads(text)
        written = list(_written(parameters, told["tiles"], flat))
        if checksum(written) != told["checksum"]:
            raise ValueError("weights that were read back have another checksum than those that were sent")


def _written(
    parameters: dict[str, torch.nn.Parameter], tiles: list[dict[str, Any]], flat: Tensor
) -> Iterator[Tensor]:
    at = 0
    for each in (Tile(**told) for told in tiles):
        place = _place(parameters[each.parameter].data, each)
        if list(place.shape) != list(each.shape) or place.dtype != flat.dtype:
            found, wanted = f"{list(place.shape)} of {place.dtype}", f"{each.shape} of {flat.dtype}"
            raise ValueError(f"`{each.parameter}` has {found} at row {each.start}, not {wanted}")
        yield place.copy_(flat[at : at + each.size].view(each.shape))
        at += each.size


def _place(parameter: Tensor, tile: Tile) -> Tensor:
    if tile.expert is not None:
        parameter = parameter[tile.expert]
    start = tile.start + tile.half * (len(parameter) // 2)
    rows = parameter[start : start + tile.shape[0]]
    if rows.dim() < 2 or rows.shape[1] <= tile.shape[1]:
        return rows
    if rows[:, tile.shape[1] :].any():
        raise ValueError(f"`{tile.parameter}` is wider than {tile.shape}, and not filled up with zeros")
    return rows[:, : tile.shape[1]]
