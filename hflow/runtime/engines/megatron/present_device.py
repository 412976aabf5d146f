"""The device that Megatron works on in this process.

Megatron-core takes the current CUDA device in places that run on every machine. `cpu` rewrites those places
to ask here: whether there is a GPU says nothing about where a plan's model belongs. Rewritten code finds
`product` and two collectives here, too.
"""

from __future__ import annotations

import torch

from hflow.runtime.engines.megatron.gloo_collectives import all_gather as all_gather
from hflow.runtime.engines.megatron.gloo_collectives import reduce_scatter as reduce_scatter
from hflow.runtime.engines.megatron.products import product as product

_present = torch.device("cpu")


def work_on(device: torch.device) -> None:
    """From now on: for the model that is built next."""
    global _present
    _present = device


def current_device() -> torch.device | int:
    """As `torch.cuda.current_device` where that is meant."""
    return torch.cuda.current_device() if _present.type == "cuda" else _present


def platform() -> str:
    """``cpu`` or ``cuda``."""
    return _present.type


def synchronize() -> None:
    """Wait for the device's stream; gloo has already waited."""
    if _present.type == "cuda":
        torch.cuda.synchronize()


def tensor_type(kind: str) -> str:
    """What `Tensor.type` says of a tensor there: ``torch.FloatTensor``, ``torch.cuda.FloatTensor``."""
    return f"torch.cuda.{kind}Tensor" if _present.type == "cuda" else f"torch.{kind}Tensor"


def compiles() -> bool:
    """Whether Megatron marks functions for torch.compile as it is imported."""
    return torch.cuda.is_available()
