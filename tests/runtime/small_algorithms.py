"""The shipped algorithms with tiny, random models and few rows.

The rule that judges sums is replaced by one that rewards any text with digits (`./rewards.py`), since random
models never add; everything else is as shipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import hflow
from hflow.graph.ir import Graph
from hflow.runtime.tools.new_model import new_model

DENSE = f"{Path(__file__).parent / 'rewards.py'}:digits"

GROUPED = ["params.group=4", "params.minibatch=16"]
SINGLE = ["params.minibatch=4"]
# What makes an algorithm small, besides the number of steps and the models.
SMALL = {
    "sft": [],
    "dpo": [],
    "reward_model": [],
    "cost_model": [],
    "ppo": SINGLE,
    "safe_rlhf": SINGLE,
    "remax": [*SINGLE, f"nodes.reward.fn={DENSE}", f"nodes.greedy_reward.fn={DENSE}"],
    "reinforce_pp": [*SINGLE, f"nodes.reward.fn={DENSE}"],
    "on_policy_distillation": SINGLE,
    "online_dpo": ["params.minibatch=8", f"nodes.reward.fn={DENSE}"],
    "dapo": [*GROUPED, "params.draw=6", f"nodes.sampling.nodes.reward.fn={DENSE}"],
    "iterative_grpo": [*GROUPED, "params.refresh=1", f"nodes.reward.fn={DENSE}"],
    "tool_grpo": [
        *GROUPED,
        "params.max_new_tokens=6",
        f"nodes.reward.fn={DENSE}",
        *(f"nodes.tool_{turn}.fn={DENSE.replace('digits', 'remark')}" for turn in (1, 2)),
    ],  # random models call no calculator
}
DEFAULT = [*GROUPED, f"nodes.reward.fn={DENSE}"]


def make_models(folder: Path) -> dict[str, Path]:
    """The folders that the params `model`, `teacher`, `reward_model` and `cost_model` name."""
    seeds = {"model": 3, "teacher": 4, "reward_model": 5, "cost_model": 6}
    for name, seed in seeds.items():
        new_model(
            folder / name, layers=2, hidden=32, heads=4, ffn=64, alphabet="0123456789+-=. ", max_positions=64,
            seed=seed, head="scalar" if seed > 4 else "lm",
        )  # fmt: skip
    return {name: folder / name for name in seeds}


def small_graph(path: Path, models: Mapping[str, Path], steps: int, more: Sequence[str] = ()) -> Graph:
    """An algorithm of so many steps, with further overrides."""
    params = hflow.load(path).params
    given = [f"params.{name}={folder}" for name, folder in models.items() if name in params]
    small = {"steps": steps, "batch": 8, "holdout": 8}
    given += [f"params.{name}={value}" for name, value in small.items() if name in params]
    return hflow.load(path, [*given, *SMALL.get(path.stem, DEFAULT), *more])
