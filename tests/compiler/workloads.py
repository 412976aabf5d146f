"""The algorithms at a realistic size: models of a well-known shape in bf16, prompts and responses of 1,024
tokens, 1,024 rows or more per step. Compiling them reads no files but the graph's."""

from __future__ import annotations

from pathlib import Path

import hflow
from hflow.graph.ir import Graph

ROOT = Path(__file__).resolve().parent.parent.parent
ALGORITHMS = tuple(sorted(f.stem for f in (ROOT / "algorithms").glob("*.yaml")))
TOKENS = 1024
WITHOUT_ROLLOUTS = ("sft", "dpo", "reward_model", "cost_model")
GROUPS_OF_8 = ("grpo", "async_grpo", "cispo", "dr_grpo", "gspo", "iterative_grpo", "rloo", "tool_grpo")
SHAPE = "shape:{shape}"
MORE: dict[str, dict[str, object]] = {
    "ppo": {"reward_model": SHAPE},
    "safe_rlhf": {"reward_model": SHAPE, "cost_model": SHAPE},
    "on_policy_distillation": {"teacher": SHAPE},
    "online_dpo": {"batch": 512},
    "dapo": {"batch": 128, "draw": 256, "rounds": 4, "overlong": 128},
    "tool_grpo": {"max_new_tokens": 256, "max_observation_tokens": 128},
}


def model_params(algorithm: str) -> tuple[str, ...]:
    """The parameters that name model folders."""
    return ("model", *(name for name, value in MORE.get(algorithm, {}).items() if value == SHAPE))


def large(algorithm: str, shape: str, *overrides: str) -> Graph:
    """`algorithms/<algorithm>.yaml` with all models of the named `shape`, e.g. ``llama-7b``."""
    return hflow.load(_file(algorithm), [*settings(algorithm, shape), *overrides])


def settings(algorithm: str, shape: str) -> list[str]:
    """What ``--set`` says for such a graph."""
    models = [f"models.{m.name}.dtype=bf16" for m in hflow.load(_file(algorithm)).models]
    sizes = _params(algorithm) | MORE.get(algorithm, {})
    params = [f"params.{name}={value}".format(shape=shape) for name, value in sizes.items()]
    return [*params, *models, *_lengths(algorithm)]


def _file(algorithm: str) -> Path:
    return ROOT / f"algorithms/{algorithm}.yaml"


def _params(algorithm: str) -> dict[str, object]:
    sizes: dict[str, object] = {"model": SHAPE, "batch": 128 if algorithm in GROUPS_OF_8 else 1024}
    if algorithm != "dpo":
        sizes["holdout"] = 1024
    if algorithm not in WITHOUT_ROLLOUTS:
        sizes |= {"max_new_tokens": TOKENS, "minibatch": 128}
    return sizes


def _lengths(algorithm: str) -> list[str]:
    """The greatest lengths of what data nodes give."""
    node = {
        "dapo": "sampling.nodes.prompts",
        "dpo": "pairs",
        "reward_model": "pairs",
        "cost_model": "pairs",
        "sft": "examples",
    }.get(algorithm, "prompts")
    lengths = {node: ("prompt", "response") if algorithm in WITHOUT_ROLLOUTS else ("prompt",)}
    if algorithm == "safe_rlhf":
        lengths["texts"] = ("prompt", "response")
    return [f"nodes.{n}.with.max_{what}_tokens={TOKENS}" for n, each in lengths.items() for what in each]
