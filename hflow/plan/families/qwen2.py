"""Qwen2 and Qwen2.5 (arXiv:2412.15115): queries, keys and values have biases, whatever `attention_bias` says,
which transformers does not read here."""

from __future__ import annotations

from hflow.plan.families.checks import DENSE, attention_bias
from hflow.plan.families.family import Family
from hflow.plan.families.windows import in_some_layers

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2",
    checks=tuple(check for check in DENSE if check is not attention_bias),
    qkv_bias=True,
    window=in_some_layers,
)
