"""The bits of a tensor's elements: whether two are the same to the last one, and a checksum over them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**18  # of a checksum, in memory at once
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes of an element


def element_bits(values: Tensor) -> Tensor:
    """As integers of the same size, in one dimension; a NaN equals itself, and zeros differ by their sign."""
    return values.reshape(-1).view(_INTEGERS[values.element_size()])


def checksum(parts: Iterable[Tensor]) -> int:
    """A sum modulo 2^64 over the elements' bits, each times an odd number that tells its place."""
    total, place = 0, 0
    for part in parts:
        own = torch.zeros((), dtype=torch.int64, device=part.device)
        for chunk in element_bits(part).split(CHUNK_ELEMENTS):
            end = place + len(chunk)
            own += (torch.arange(2 * place + 1, 2 * end + 1, 2, device=chunk.device) * chunk).sum()
            place = end
        total += int(own)
    return (total + 2**63) % 2**64 - 2**63
