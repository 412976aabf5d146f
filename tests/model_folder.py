"""A folder with nothing but the configuration of a model, and graphs over it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hflow
from hflow.graph.ir import Graph

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 352,
    "vocab_size": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with nothing but a config.json: compiling reads no weights. Named the same in every test."""
    root = Path.cwd()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    for name in ("algorithms", "clusters", "tests"):
        (tmp_path / name).symlink_to(root / name)
    return "model"


@pytest.fixture
def grpo(model: str) -> Graph:
    return hflow.load("algorithms/grpo.yaml", [f"params.model={model}"])


@pytest.fixture
def ppo(model: str) -> Graph:
    return hflow.load("algorithms/ppo.yaml", [f"params.model={model}", f"params.reward_model={model}"])
