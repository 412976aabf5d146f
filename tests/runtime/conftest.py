"""One Ray with four workers for all runtime tests; plans of any size up to four run on it in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.controller.pool import Pool
from hflow.runtime.new_model import new_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: 4 layers x 32, 4 heads, vocabulary 32."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    new_model(
        folder, family="qwen2", layers=4, hidden=32, heads=4, kv_heads=4, ffn=64,
        alphabet="0123456789+=. ", max_positions=64, tied=False, seed=3, force=False,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def workers() -> Iterator[Pool]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    local = LocalRay()
    from hflow.runtime.controller.ray_pool import RayPool

    pool = RayPool(4, local)
    yield pool
    pool.close()
