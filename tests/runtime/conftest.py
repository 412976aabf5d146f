"""One Ray for all runtime tests; plans of any size up to its number of workers run on it in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.controller.pool import Pool
from hflow.runtime.tools.new_model import new_model
from tests.runtime.matrix import WORKERS, Matrix

FEW = 4


def _tiny(folder: Path, seed: int, head: str) -> Path:
    new_model(
        folder, family="qwen2", layers=4, hidden=32, heads=4, kv_heads=4, ffn=64,
        alphabet="0123456789+=. ", max_positions=64, tied=False, seed=seed, force=False, head=head,
    )  # fmt: skip
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share one Ray run one after the other (Makefile)."""
    for item in items:
        if "workers" in getattr(item, "fixturenames", ()):
            item.add_marker("one_ray")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: 4 layers x 32, 4 heads, vocabulary 32."""
    return _tiny(tmp_path_factory.mktemp("models") / "tiny", 3, "lm")


@pytest.fixture(scope="session")
def tiny_reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a scalar head, and other weights."""
    return _tiny(tmp_path_factory.mktemp("models") / "tiny_reward", 5, "scalar")


@pytest.fixture(scope="session")
def workers(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Four workers; eight where a test of this session needs `many_workers`, since a process has one Ray."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    local = LocalRay()
    from hflow.runtime.controller.ray_pool import RayPool

    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    count = WORKERS if "many_workers" in needed else FEW
    pool = RayPool((count,), local)
    pool.form(count)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def many_workers(workers: Pool) -> Pool:
    """`matrix.WORKERS` of them."""
    return workers


@pytest.fixture(scope="session")
def matrix(
    many_workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path_factory: pytest.TempPathFactory
) -> Matrix:
    """The runs of the test matrix, each made once."""
    return Matrix(many_workers, tiny_model, tiny_reward, tmp_path_factory.mktemp("matrix"))
