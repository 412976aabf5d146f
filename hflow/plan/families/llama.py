"""Llama 1 to 3.3, Code Llama, and what shares their architecture."""

from __future__ import annotations

from hflow.plan.families.checks import DENSE
from hflow.plan.families.family import Family

FAMILY = Family(name="llama", architecture="Llama", checks=DENSE)
