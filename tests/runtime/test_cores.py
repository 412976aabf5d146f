"""Cores of workers: what they share out covers what they may use, whoever else uses the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.runtime.cores import Cores, allowed, share_out
from hflow.runtime.worker.shared_cores import agree
from hflow.runtime.worker.worker import Worker
from tests.engines.processes import Pool


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(1, 40))
def test_cores_are_shared_out_evenly(cores: set[int], parts: int) -> None:
    shares = share_out(sorted(cores), parts)
    sizes = [len(share) for share in shares]
    assert len(shares) == parts
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert set().union(*shares) == cores if parts <= len(cores) else set().union(*shares) <= cores
    assert sum(sizes) == max(len(cores), parts)  # none is in two shares unless there are too few


@pytest.mark.parametrize(
    ("told", "cores"), [("max 100000", None), ("150000 100000", 2), ("100000 100000", 1), ("1000 100000", 1)]
)
def test_a_containers_limit_counts(told: str, cores: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{told}\n")
    every = sorted(os.sched_getaffinity(0))
    found = allowed(tmp_path / "cpu.max")
    assert len(found) == min(cores or len(every), len(every)) and set(found) <= set(every)
    assert found == allowed(tmp_path / "cpu.max")
    assert allowed(tmp_path / "none") == tuple(every)


def test_containers_with_a_limit_take_other_cores(tmp_path: Path) -> None:
    """Two files with successive inodes stand for two containers."""
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    chosen = set[Cores]()
    for number in range(64):
        (tmp_path / str(number)).touch()
        chosen.add(allowed(tmp_path / "cpu.max", tmp_path / str(number)))
    assert chosen == {(core,) for core in os.sched_getaffinity(0)}


def bound(rank: int, _: Any, bound_rank: int) -> dict[int, Cores]:
    """What a rank agrees upon with the others, where `bound_rank` may use the last core only."""
    every = os.sched_getaffinity(0)
    if rank == bound_rank:
        os.sched_setaffinity(0, {max(every)})
    try:
        return agree(rank, 3)
    finally:
        os.sched_setaffinity(0, every)


@pytest.mark.skipif(len(allowed()) < 2, reason="needs two cores")
def test_those_that_may_use_the_same_cores_share_them(pool: Pool) -> None:
    first, second, other = pool.run(3, bound, 2)
    assert first == second == dict(zip((0, 1), share_out(allowed(), 2)))
    assert other == {2: (max(allowed()),)}


def test_a_worker_has_as_many_threads_as_cores() -> None:
    before, worker = torch.get_num_threads(), Worker()
    try:
        torch.set_num_threads(len(allowed()) + 1)
        assert worker.join(HashStore(), 1, 0, 1) == {}
        assert torch.get_num_threads() == len(allowed())
    finally:
        worker.close()
        torch.set_num_threads(before)
