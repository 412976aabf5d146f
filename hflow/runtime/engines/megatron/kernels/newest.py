"""Attention of one token of each row to all before it, by as many programs as fill the device.

A row's keys are cut into parts, which programs read at the same time; what each has found is then joined
(Flash-Decoding, arXiv:2307.08691 and its authors' note on decoding). Queries that share a key read it once.
"""

# Triton may not be installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hflow.runtime.engines.megatron.kernels import jit

AT_ONCE = 64  # keys of one step of a program, as long as they take no more than
KEY_BYTES = 256  # each, so that two steps' keys and values fit beside each other
LEAST = 16  # sides of the matrices that tensor cores multiply
PROGRAMS = 512  # that keep a device busy


def attend_newest(query: Tensor, key: Tensor, value: Tensor, present: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v of ``[rows, groups, heads, d]``, one query a head.

    Args:
        key, value: ``[rows, groups, places, d]``, of which parts of a larger memory will do.
        present: bool ``[rows, places]``, True where a key is seen, at least one of each row.
    """
    rows, groups, heads, width = query.shape
    places, query = key.shape[2], query.contiguous()
    room = AT_ONCE * KEY_BYTES // max(KEY_BYTES, width * key.element_size())
    at_once = max(LEAST, 1 << (room.bit_length() - 1))  # a power of two
    steps = triton.cdiv(places, at_once)
    parts = min(steps, triton.cdiv(PROGRAMS, rows * groups))
    length = triton.cdiv(steps, parts) * at_once
    parts = triton.cdiv(places, length)
    sums = torch.empty(rows * groups, parts, heads, width, dtype=torch.float32, device=query.device)
    tops = torch.empty(2, rows * groups, parts, heads, dtype=torch.float32, device=query.device)
    found = torch.empty_like(query)
    sizes = max(LEAST, triton.next_power_of_2(heads)), max(LEAST, triton.next_power_of_2(width))
    _parts[(rows * groups, parts)](
        query, key, value, present, sums, *tops.unbind(), groups, heads, width, places, length,
        *key.stride()[:3], *value.stride()[:3], present.stride(0), width**-0.5, *sizes, at_once,
    )  # fmt: skip
    _joined[(rows * groups,)](sums, *tops.unbind(), found, parts, heads, width, *sizes)
    return found


@jit
def _parts(
    query, key, value, present, sums, tops, totals, groups, heads, width, places, length,
    key_row, key_group, key_place, value_row, value_group, value_place, present_row, scale,
    all_heads: tl.constexpr, all_dims: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Of one group of one row and `length` of its keys: the sum of values by exp(score - top), of the latter,
    and the top of each head."""
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, group = pair // groups, pair % groups
    head, dim = tl.arange(0, all_heads)[:, None], tl.arange(0, all_dims)[None, :]
    own = (pair * heads + head) * width + dim
    q = tl.load(query + own, mask=(head < heads) & (dim < width), other=0.0)
    keys, values = key + row * key_row + group * key_group, value + row * value_row + group * value_group
    top = tl.full([all_heads], -float("inf"), tl.float32)
    total = tl.zeros([all_heads], tl.float32)
    found = tl.zeros([all_heads, all_dims], tl.float32)
    for first in range(part * length, tl.minimum((part + 1) * length, places), at_once):
        at = first + tl.arange(0, at_once)
        seen = tl.load(present + row * present_row + at, mask=at < places, other=0) != 0
        inside = seen[:, None] & (dim < width)
        k = tl.load(keys + at[:, None] * key_place + dim, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing was seen so far
        weights, lowered = tl.exp(scores - base[:, None]), tl.exp(top - base)
        v = tl.load(values + at[:, None] * value_place + dim, mask=inside, other=0.0)
        found = found * lowered[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * lowered + tl.sum(weights, 1)
        top = higher
    heads_at = tl.arange(0, all_heads)
    place = (pair * tl.num_programs(1) + part) * heads
    tl.store(tops + place + heads_at, top, mask=heads_at < heads)
    tl.store(totals + place + heads_at, total, mask=heads_at < heads)
    tl.store(sums + (place + head) * width + dim, found, mask=(head < heads) & (dim < width))


@jit
def _joined(sums, tops, totals, out, parts, heads, width, all_heads: tl.constexpr, all_dims: tl.constexpr):
    """Of one group of one row: what all parts have found."""
    pair = tl.program_id(0).to(tl.int64)
    head, dim, heads_at = (
        tl.arange(0, all_heads)[:, None],
        tl.arange(0, all_dims)[None, :],
        tl.arange(0, all_heads),
    )
    inside, here = (head < heads) & (dim < width), heads_at < heads
    top = tl.full([all_heads], -float("inf"), tl.float32)
    total = tl.zeros([all_heads], tl.float32)
    found = tl.zeros([all_heads, all_dims], tl.float32)
    for part in range(parts):
        place = (pair * parts + part) * heads
        own = tl.load(tops + place + heads_at, mask=here, other=-float("inf"))
        higher = tl.maximum(top, own)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        before, now = tl.exp(top - base), tl.exp(own - base)
        part_sums = tl.load(sums + (place + head) * width + dim, mask=inside, other=0.0)
        found = found * before[:, None] + part_sums * now[:, None]
        total = total * before + tl.load(totals + place + heads_at, mask=here, other=0.0) * now
        top = higher
    tl.store(out + (pair * heads + head) * width + dim, found / total[:, None], mask=inside)
