"""The row of the input embedding that does not learn, as in ``torch.nn.Embedding(padding_idx=...)``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hflow.diagnostics import Diagnostic, HflowError


def padding_token(folder: str) -> int | None:
    """``pad_token_id`` of the model's ``config.json``, which transformers gives to the embedding.

    As there, a negative one counts from the end of the vocabulary. It may be the end token too.

    Raises:
        HflowError: HF406 when it is no token.
    """
    file = Path(folder) / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    token: Any = config.get("pad_token_id")
    if token is None:
        return None
    if not isinstance(token, int) or not -config["vocab_size"] <= token < config["vocab_size"]:
        problem = f"`{file}`: pad_token_id {token!r} is no token of the vocabulary"
        raise HflowError(Diagnostic("HF406", problem))
    return token % config["vocab_size"]


def freeze_padding(embedding: torch.nn.Module, token: int | None) -> None:
    """Let no gradient reach the row of `token` through `embedding`, which gives tokens ``[...]`` their
    vectors ``[..., hidden]``.

    Where the output matrix is the same parameter, its gradient stays. Which tokens are padding of a batch is
    no matter of this row: that is known by lengths, and what is sampled may well be this token.
    """

    def frozen(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            here = (inputs[0] == token)[..., None]
            output.register_hook(lambda gradient: gradient.masked_fill(here, 0))

    if token is not None:
        embedding.register_forward_hook(frozen)
