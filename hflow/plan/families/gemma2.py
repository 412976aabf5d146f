"""Gemma 2 (arXiv:2408.00118): scores and logits are capped, and every other layer has a window."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hflow.plan.families.family import Family
from hflow.plan.families.gemma import CHECKS, HEAD_DIM, as_gemma, cap
from hflow.plan.families.windows import but_in_every
from hflow.plan.model_config import ModelConfig
from hflow.plan.model_shape import ModelShape

ATTENTION_CAP, LOGIT_CAP = 50.0, 30.0  # transformers', where a file has no such key


def _complete(config: ModelConfig, shape: ModelShape) -> ModelShape:
    return replace(
        as_gemma(config, shape),
        attention_cap=cap(config, "attn_logit_softcapping", ATTENTION_CAP),
        logit_cap=cap(config, "final_logit_softcapping", LOGIT_CAP),
    )


FAMILY = Family(
    name="gemma2",
    architecture="Gemma2",
    checks=CHECKS,
    head_dim=HEAD_DIM,
    tied=True,
    window=partial(but_in_every, 2),
    complete=_complete,
)
