"""A weight loader as a server's `weight_loader` names it: it runs in SGLang's processes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

LOADER = f"{__name__}.halve"


def halve(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    model.load_weights([(name, tensor / 2) for name, tensor in named_tensors])
