"""Decoding by CUDA graphs draws what decoding without them draws, whatever the model's attention."""

from __future__ import annotations

import random
from unittest.mock import patch

import torch

from hflow.graph.types import NO_TRUNCATION, Truncation
from hflow.runtime.ends import EndRule
from hflow.runtime.engines.megatron import static_decoding
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.megatron.generate import Sampling, generate
from hflow.runtime.engines.megatron.responses import Responses
from hflow.runtime.rows import from_lists
from scripts.gpu_acceptance.models import END, alone, engine, vivid_model
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

# with norms of heads; windows and capped scores; fused weights; windows alone
FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "mistral")
TRUNCATIONS = (NO_TRUNCATION, Truncation(top_k=9, top_p=0.9))
ROWS, NEW = 32, 300  # so that a graph is captured again for more places
TOLERANCE = 1e-4  # of log-probs in float32
SAME = 0.95  # of rows: sums in another order may move a draw from one token to the next


def run(setting: Setting) -> Figures:
    world, figures = alone(setting), {}
    platforms = (setting.device.type,)
    for family in FAMILIES:
        folder = vivid_model(setting.folder / f"decoding_{family}", family)
        model = engine(world, folder, "f32")
        for truncation in TRUNCATIONS:
            found = []
            for static in ((), platforms):
                with patch.object(static_decoding, "PLATFORMS", static):
                    found.append(_sampled(model, truncation))
            name = family + (" truncated" if truncation else "")
            figures[name] = _compared(*found)
            need(figures[name]["same_rows"] >= SAME * ROWS, f"{name}: rows differ", figures)
            need(figures[name]["apart"] <= TOLERANCE, f"{name}: log-probs differ", figures)
    world.close()
    if not setting.on_gpu:
        raise Skipped("static steps draw the same; they are captured on CUDA only", figures)
    return figures


def _sampled(model: MegatronModel, truncation: Truncation) -> Responses:
    draw = random.Random(0)
    prompts = from_lists([[draw.randrange(2, 15) for _ in range(1 + i % 7)] for i in range(ROWS // 2)])
    sampling = Sampling(NEW, 1.0, seed=3, step=1, stream=0, ends=EndRule(END), truncation=truncation)
    return generate(model.model, prompts, torch.arange(ROWS), sampling, ROWS, model.device)


def _compared(growing: Responses, static: Responses) -> Figures:
    same, apart, lengths = 0, 0.0, growing.lengths.tolist()
    for row, (length, other) in enumerate(zip(lengths, static.lengths.tolist())):
        if length != other or not torch.equal(growing.tokens[row, :length], static.tokens[row, :length]):
            continue
        same += 1
        difference = (growing.log_probs[row, :length] - static.log_probs[row, :length]).abs()
        apart = max(apart, float(difference.max()))
    return {"same_rows": same, "apart": apart, "lengths": [min(lengths), max(lengths)]}


if __name__ == "__main__":
    main(run)
