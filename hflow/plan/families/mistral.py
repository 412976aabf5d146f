"""Mistral 7B and its like (arXiv:2310.06825): Llama with a window in every layer, which null turns off."""

from __future__ import annotations

from hflow.plan.families.checks import DENSE
from hflow.plan.families.family import Family
from hflow.plan.families.windows import in_all_layers

FAMILY = Family(name="mistral", architecture="Mistral", checks=DENSE, window=in_all_layers)
