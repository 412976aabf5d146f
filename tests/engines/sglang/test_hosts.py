"""Servers over several hosts: who starts what, and how hosts hear of each other."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.engines.sglang import meeting, replica
from hflow.runtime.engines.sglang.hosts import ONE_HOST, ServerHosts
from hflow.runtime.engines.sglang.meeting import Meeting
from hflow.runtime.engines.sglang.options import ServerOptions
from hflow.runtime.engines.sglang.serve import arguments, meeting_place
from tests.engines.models import Folders
from tests.engines.processes import Pool
from tests.engines.sglang.servers import options
from tests.installed import needs_sglang

LOOPBACK = "127.0.0.1"
SOON_S = 60.0  # of the half hour in which a server may start


def test_hosts_have_equally_many_ranks_one_after_the_other() -> None:
    assert ServerHosts.of(["a"], 0) == ServerHosts.of(["a", "a"], 1) == ONE_HOST
    of_each = [ServerHosts.of(["b", "b", "a", "a"], rank) for rank in range(4)]
    assert of_each == [ServerHosts(2, 0), ServerHosts(2, 0), ServerHosts(2, 1), ServerHosts(2, 1)]
    with pytest.raises(ValueError, match="rank 0 on host 0, rank 1 on host 0, rank 2 on host 1$"):
        ServerHosts.of(["a", "a", "b"], 0)
    with pytest.raises(ValueError, match="one host after the other"):
        ServerHosts.of(["a", "b", "a", "b"], 0)


def test_hosts_hear_of_the_start_and_of_the_first_failure() -> None:
    first = Meeting.open(LOOPBACK)
    second = Meeting.join(first.place)
    assert not second.has_started and not second.failure()
    first.tell_started()
    assert second.has_started
    second.fail("no memory")
    first.fail("lost the other one")
    assert first.failure() == second.failure() == "no memory"


def test_a_first_host_that_is_gone_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Meeting.open(LOOPBACK)
    second, place = Meeting.join(first.place), first.place
    del first
    assert "cannot be reached" in second.failure()
    second.fail("told to nobody")
    monkeypatch.setattr(meeting, "JOIN", timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        Meeting.join(place)


def test_sglang_is_told_of_the_hosts() -> None:
    """Loopback, and files, are for one host."""
    alone = meeting_place("/folder", ONE_HOST)
    assert alone["GLOO_SOCKET_IFNAME"] == "lo"
    assert alone["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "file:///folder/store"
    second = ServerHosts(2, 1, "10.0.0.1:4711")
    together = meeting_place("/folder", second)
    assert together["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "tcp://10.0.0.1:4711"
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & together.keys()
    given = arguments(options("model", tp=4, hosts=second), 1, "")
    assert (given["tp_size"], given["nnodes"], given["node_rank"]) == (4, 2, 1)
    with pytest.raises(ValueError, match="2 ranks on 4 devices"):
        options("model", tp=4, devices=("0", "1", "2", "3"), hosts=second)


@needs_sglang
@pytest.mark.slow
def test_a_host_that_cannot_start_its_part_ends_the_others(folders: Folders, pool: Pool) -> None:
    """Here it has no model. The first host's ranks would wait for those of the second."""
    began = time.monotonic()
    told = pool.run(2, _start, folders.of("qwen2", False))
    assert time.monotonic() - began < SOON_S
    assert told[0] == told[1]
    assert "FileNotFoundError" in told[0] and "elsewhere/config.json" in told[0]


def _start(rank: int, new_group: NewGroup, folder: str) -> str:
    """What a rank is told that takes itself for one on a host of its own."""
    group = new_group((0, 1))

    def of(_: tuple[str, ...], hosts: ServerHosts) -> ServerOptions:
        return options(folder if rank == 0 else f"{folder}/elsewhere", tp=2, hosts=hosts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "network_stack", lambda: f"host {rank}")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        with pytest.raises(NodeError) as error:
            replica.Replica("rollout", torch.device("cpu"), "", of, group, threading.Event(), lambda _: None)
    return str(error.value)
