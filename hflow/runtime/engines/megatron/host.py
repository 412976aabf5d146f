"""Tensors that leave the device for a while."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """Copies of tensors in the host's memory, pinned where there is a GPU; False while there are none.

    A copy stays when its tensor is back on the device: what has not changed need not be copied twice, and
    pinning memory is slow.
    """

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    def store(self, tensors: Iterable[Tensor]) -> int:
        """Copy what the tensors hold. Returns bytes copied."""
        return sum(self._store(tensor) for tensor in tensors)

    def restore(self, tensors: Iterable[Tensor]) -> int:
        """Give tensors back, in new memory on their devices, what was stored. Returns bytes copied."""
        return sum(self._restore(tensor) for tensor in tensors)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """What a tensor holds, or held before it was dropped."""
        is_dropped = tensor in self._copies and not tensor.numel()
        return self._copies[tensor] if is_dropped else tensor.detach()

    def _store(self, tensor: Tensor) -> int:
        if tensor not in self._copies:
            self._copies[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._copies[tensor].copy_(tensor.detach())
        return tensor.nbytes

    def _restore(self, tensor: Tensor) -> int:
        tensor.data = self._copies[tensor].to(tensor.device, non_blocking=True, copy=True)
        return tensor.nbytes


def drop(tensors: Iterable[Tensor]) -> None:
    """Free their memory. They stay the same objects, without elements, so that whatever computes with them
    fails; under a tensor of the old shape, torch would read a freed storage."""
    for tensor in tensors:
        tensor.data = tensor.data.new_empty(0)
