"""Kimi K2 (arXiv:2507.20534): DeepSeek-V3 with more experts and fewer heads. Plans only."""

from __future__ import annotations

from dataclasses import replace

from hflow.plan.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, name="kimi_k2")
