"""What ranks tell each other comes whole and in order, and nobody unpickles."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hflow.runtime.engines.gather_json import broadcast_json, gather_json
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.optimizer import _group_key, _same_groups
from tests.engines.processes import Pool

SIZE = 3
TOLD = [None, "", {"text": "é" * 1000, "numbers": [0.1, 1e-300, 2**62, float("inf")]}]


def _refuse(*_: Any) -> Any:
    raise AssertionError("something is unpickled")


def on_rank(rank: int, new_group: NewGroup) -> Any:
    group = new_group(tuple(range(SIZE)))
    before, distributed_c10d._unpickler = distributed_c10d._unpickler, _refuse  # type: ignore[assignment]
    try:
        gathered = gather_json(TOLD[rank], group)
        broadcast = broadcast_json(TOLD[2 - rank], group)
        with _same_groups(group):
            keys: list[Any] = [None]
            dist.all_gather_object(keys, [(None, False), ((("wd_mult", float(rank)),), True)])
    finally:
        distributed_c10d._unpickler = before
    return gathered, broadcast, keys


def test_all_ranks_hear_all(pool: Pool) -> None:
    keys = [[(None, False), ((("wd_mult", float(rank)),), True)] for rank in range(SIZE)]
    assert pool.run(SIZE, on_rank) == [(TOLD, TOLD[2], keys)] * SIZE


@pytest.mark.parametrize("key", [(None, 1), ([["lr", [1]]], True), ([["lr", {}]], False), ([["lr"]], False)])
def test_what_is_no_key_of_a_parameter_group_is_refused(key: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError):
        _group_key(*key)
