"""A tensor as bytes that another process on the same host opens without a copy: a handle to its memory."""

from __future__ import annotations

import base64
import io
from multiprocessing.reduction import ForkingPickler

import torch.multiprocessing as mp
from torch import Tensor


def handle(name: str, tensor: Tensor) -> str:
    """What SGLang's /update_weights_from_tensor takes for one rank: base64 of a named tensor.

    It can be opened once. The tensor must live until then; one in a CPU's memory is moved into shared memory,
    where it stays.
    """
    if tensor.is_cuda:  # devices are told by their uuid: the other process may number them differently
        from sglang.srt.utils.patch_torch import (  # pyright: ignore[reportMissingImports]
            monkey_patch_torch_reductions,
        )

        monkey_patch_torch_reductions()
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")  # file descriptors go to children only
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump([(name, tensor)])
    finally:
        mp.set_sharing_strategy(before)
    return base64.b64encode(buffer.getvalue()).decode()
