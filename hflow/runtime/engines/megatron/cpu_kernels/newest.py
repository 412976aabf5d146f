"""Attention of one token of each row to all before it."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.cpu_kernels.library import call
from hflow.runtime.engines.megatron.prefix import Prefix

KeysAndValues = tuple[Tensor, Tensor]  # each ``[rows, groups, places, d]``, of the same strides


def attend_newest(
    query: Tensor,
    layer: int,
    prefix: Prefix,
    own: KeysAndValues,
    cap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v of ``[rows, groups, heads, d]``, one query a head.

    Rows that share a prompt are taken after each other: what they read is near.

    Args:
        layer: whose keys and values of the `prefix` are meant.
        own: the tokens of each row that come after its prefix.
        cap, sinks: see `explicit_attention`; sinks are ``[groups * heads]``.
        window: how many tokens, with itself, a token sees; None: all.
    """
    before, own, present = within(window, layer, prefix, own)
    assert before[0].shape[1::2] == query.shape[1::2]
    query, found = query.contiguous(), torch.empty_like(query)
    sinks = None if sinks is None else sinks.float()
    given = *before, present, prefix.of, prefix.order, *own, sinks, found
    call("attend_newest", query, query, *given, *query.shape, *sizes(before[0]), *sizes(own[0]), cap or 0.0)
    return found


def within(
    window: int | None, layer: int, prefix: Prefix, own: KeysAndValues
) -> tuple[KeysAndValues, KeysAndValues, Tensor | None]:
    """What the newest token sees of a layer's `prefix` and of its row's `own` tokens, and which of the prefix
    are present."""
    before, present = prefix.layers[layer], prefix.present
    hidden = max(0, prefix.places + own[0].shape[2] - window) if window is not None else 0
    if hidden:
        of_prefix = min(hidden, prefix.places)
        before, own = _from(of_prefix, before), _from(hidden - of_prefix, own)
        present = None if present is None else present[:, of_prefix:].contiguous()
    for key, value in (before, own):
        assert key.shape == value.shape and key.shape[1::2] == own[0].shape[1::2]
        assert key.stride() == value.stride() and key.stride()[2:] == (key.shape[3], 1)
    assert present is None or (present.dtype == torch.bool and present.is_contiguous())
    return before, own, present


def _from(first: int, given: KeysAndValues) -> KeysAndValues:
    return given[0][:, :, first:], given[1][:, :, first:]


def sizes(key: Tensor) -> tuple[int, int, int]:
    """The places, and how far rows and groups are apart."""
    return key.shape[2], key.stride(0), key.stride(1)
