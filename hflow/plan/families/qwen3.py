"""Qwen3 (arXiv:2505.09388): queries and keys are normalised, and heads have a width of their own."""

from __future__ import annotations

from hflow.plan.families.checks import DENSE
from hflow.plan.families.family import Family
from hflow.plan.families.windows import in_some_layers

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3",
    checks=DENSE,
    qk_norm=True,
    head_dim=128,
    window=in_some_layers,
)
