"""A model whose next token depends on the last one alone, so that prompts say how long their answers are."""

from __future__ import annotations

import json
from math import log, sqrt
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hflow.runtime.tools.new_model import new_model

ALPHABET = "0123456789+=. "
EOS, FIRST = 1, 3  # ids: padding, end, unknown, then characters
VOCABULARY = 32


def growing_model(
    folder: Path, layers: int = 4, hidden: int = 32, ffn: int = 64, mean_long: float = 60.0
) -> Path:
    """After ``=`` come one or two characters; after ``.``, digits, `mean_long` of them on average."""
    new_model(
        folder, family="qwen2", layers=layers, hidden=hidden, heads=4, kv_heads=4, ffn=ffn, alphabet=ALPHABET,
        max_positions=256, seed=3,
    )  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values.zero_()  # every layer passes on what it gets
    tensors["model.embed_tokens.weight"] = torch.eye(VOCABULARY, hidden)
    # a token's embedding has a norm of 1, and leaves the last norm with one of sqrt(hidden)
    head = torch.zeros(VOCABULARY, hidden)
    head[:, :VOCABULARY] = _log_probs(mean_long).T / sqrt(hidden)
    tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def growing_rows(file: Path, short: int, long: int) -> Path:
    """Rows with short answers, then rows with long ones; no two prompts are alike."""
    ends = ["="] * short + ["."] * long
    lines = (json.dumps({"question": f"{n:04}{end}"}) for n, end in enumerate(ends))
    file.write_text("".join(line + "\n" for line in lines))
    return file


def _log_probs(mean_long: float) -> torch.Tensor:
    """``[last, next]``: natural logarithms; what is impossible has -20."""
    digits = [FIRST + i for i in range(10)]
    plus, equals, point = (FIRST + ALPHABET.index(c) for c in "+=.")
    out = torch.full((VOCABULARY, VOCABULARY), -20.0)
    for last in (*digits, point):
        end = 1 / mean_long
        out[last, EOS] = log(end)
        out[last, digits] = log((1 - end) / len(digits))
    out[equals, plus] = 0.0
    out[plus, EOS], out[plus, plus] = log(0.9), log(0.1)
    return out
