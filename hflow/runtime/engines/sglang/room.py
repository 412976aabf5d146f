"""Room on a device for a server, which is another process: it cannot use what this one keeps for later."""

from __future__ import annotations

import gc

import torch


def make_room(device: torch.device) -> None:
    """Give back what torch's allocator caches of `device`, also of models in reference cycles."""
    if device.type != "cuda":
        return
    gc.collect()
    torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """What a process that is started now finds free on `device`; 0 for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
