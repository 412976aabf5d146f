"""Stands in for SGLang's kernel package, of which there is no build for CPUs to install.

SGLang has plain PyTorch code for nearly everything; what remains is here. Other names are imported as well,
for speculative decoding, which hflow does not use: calling one of them is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

UINT32 = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _row_length: int
) -> None:
    """Write ``table[rows[i], starts[i]:ends[i]]`` for every i, from `slots`, one after the other."""
    lengths = (ends - starts).tolist()
    parts = slots.to(table.dtype).split(lengths)
    for row, start, length, part in zip(rows.tolist(), starts.tolist(), lengths, parts, strict=True):
        table[row, start : start + length] = part


def _absent(name: str) -> Callable[..., NoReturn]:
    def function(*_args: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on CPUs")

    return function


copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")


@torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bits, seed 0) of the 16 bytes (seed, position, column), little-endian.

    `seed` is uint64[n]; of the integers `positions` [n] and `columns` [m] 32 bits count; the result is
    uint32[n, m]. SGLang draws each token's noise from it. torch has few operations on unsigned numbers, so
    the hash is computed in int64, where products of 32-bit numbers wrap in bits that are masked away.
    """
    bits = seed.view(torch.int64)[:, None]
    state = torch.zeros_like(bits)
    for block in (bits, bits >> 32, positions[:, None], columns[None, :]):
        state = _mix(state, block.to(torch.int64) & UINT32)
    return _finish(state ^ 16).to(torch.uint32)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = _rotate(block * 0xCC9E2D51 & UINT32, 15) * 0x1B873593 & UINT32
    return _rotate(state ^ block, 13) * 5 + 0xE6546B64 & UINT32


def _rotate(x: Tensor, by: int) -> Tensor:
    return (x << by | x >> 32 - by) & UINT32


def _finish(x: Tensor) -> Tensor:
    x = (x ^ x >> 16) * 0x85EBCA6B & UINT32
    x = (x ^ x >> 13) * 0xC2B2AE35 & UINT32
    return x ^ x >> 16
