"""The experts that a server's routers chose, as rows of `hflow.runtime.routes`."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.sglang.server import ServerError
from hflow.runtime.routes import NONE
from hflow.runtime.rows import Rows


def served_routes(told: Sequence[str | None], lengths: Sequence[int], shape: ModelShape) -> Rows:
    """Of prompts and responses.

    Args:
        told: of each row, in base64, int32 ``[tokens - 1, layers, picks]``: of all tokens but the last, and
            also of layers without experts; of more tokens where the response went on after its end.
        lengths: of the rows, prompt and response together.

    Raises:
        ServerError: one tells of too few tokens.
    """
    found = [_of_row(text, length, shape) for text, length in zip(told, lengths, strict=True)]
    counts = torch.tensor([len(row) for row in found], dtype=torch.int64)
    return Rows(torch.cat([torch.empty(0, dtype=torch.int16), *found]), counts)


def _of_row(text: str | None, length: int, shape: ModelShape) -> Tensor:
    assert shape.moe
    values = np.frombuffer(b64decode(text or ""), np.int32)
    size = shape.num_layers * shape.moe.top_k
    if len(values) % size or len(values) < (length - 1) * size:
        raise ServerError(f"the experts of {len(values) / size:g} tokens for a row of {length}")
    of_layers = torch.from_numpy(values.astype(np.int16)).view(-1, shape.num_layers, shape.moe.top_k)
    chosen = of_layers[: length - 1, shape.moe.dense_layers :].flatten(1)
    return pad(chosen, (0, 0, 0, 1), value=NONE).flatten()
