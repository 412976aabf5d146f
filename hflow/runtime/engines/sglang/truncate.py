"""hflow's truncation inside of an SGLang server.

SGLang's own has other borders: `top_p` is of the probabilities before `top_k`, ties are broken by a sort, and
`min_p` is not for requests with a seed. Its ``return_sampling_mask`` demands a `top_k` and aborts a request
whose set is too large. So a request brings this processor of logits: SGLang then samples from what is left,
and its log-probs are of that.
"""

# SGLang is installed on demand
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

from hflow.graph.types import Truncation
from hflow.runtime.truncation import truncate

NAMES = ("temperature", "top_k", "top_p", "min_p")


class Truncate(CustomLogitProcessor):
    """Of every row as its request's ``custom_params`` say: `NAMES`."""

    def __call__(self, logits: Tensor, custom_param_list: Sequence[dict[str, Any]] | None = None) -> Tensor:
        wanted: dict[tuple[Any, ...], list[int]] = {}
        for row, params in enumerate(custom_param_list or ()):
            wanted.setdefault(tuple(params.get(name) for name in NAMES), []).append(row)
        for (temperature, *limits), rows in wanted.items():
            at = torch.tensor(rows, device=logits.device)
            part = logits[at]
            truncate(part, temperature, Truncation(*limits))
            logits[at] = part
        return logits
