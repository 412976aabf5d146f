"""Memory of a GPU that a server starts on: decisions, tried without a GPU."""

# SGLang may not be installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hflow.plan.engines.sglang import SERVER_PROFILE
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.workload import Workload
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.engines.sglang import replica, room
from hflow.runtime.engines.sglang.hosts import ONE_HOST, ServerHosts
from hflow.runtime.engines.sglang.options import ServerOptions, foresight
from hflow.runtime.engines.sglang.replica import Replica
from hflow.runtime.engines.sglang.serve import arguments
from tests.installed import needs_sglang

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GIB = 2**30


class Alone:
    """A process group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Started:
    """A server that is there at once, and dies when it is told to."""

    def __init__(self) -> None:
        self.alive = True

    def close(self) -> None:
        self.alive = False


def options(devices: tuple[str, ...], reserve_bytes: int = 3 * GIB, free_bytes: int = 0) -> ServerOptions:
    return ServerOptions(
        "model", "bfloat16", 1, devices, (), 8, 4096, 512, 0, False,
        reserve_bytes=reserve_bytes, free_bytes=free_bytes,
    )  # fmt: skip


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done, in order: on a GPU with 40 GiB free, of which 10 more when torch gives its cache back."""
    found: list[Any] = []
    free = {"bytes": 30 * GIB}

    def empty_cache() -> None:
        found.append("cache")
        free["bytes"] = 40 * GIB

    def start(given: ServerOptions, _: Callable[[str], None], meeting: None) -> Started:
        assert meeting is None
        found.append(given.free_bytes)
        return Started()

    monkeypatch.setattr(room.gc, "collect", lambda: found.append("garbage"))
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free["bytes"], 80 * GIB))
    monkeypatch.setattr(replica.Server, "start", start)
    return found


def made(device: torch.device, visible: str, reserve_bytes: int = 3 * GIB) -> Replica:
    group: Any = Alone()

    def of(devices: tuple[str, ...], hosts: ServerHosts) -> ServerOptions:
        assert hosts == ONE_HOST
        return options(devices, reserve_bytes)

    return Replica("rollout", device, visible, of, group, threading.Event(), lambda _: None)


def test_what_is_cached_is_given_back_before_a_server_starts(happened: list[Any]) -> None:
    engine = made(CUDA, "0")
    assert happened == ["garbage", "cache", 40 * GIB]
    assert engine.options.free_bytes == 40 * GIB


def test_and_before_one_that_died_starts_again(happened: list[Any]) -> None:
    engine = made(CUDA, "0")
    assert not engine.revive()
    server: Any = engine._server
    server.alive = False
    happened.clear()
    assert engine.revive()
    assert happened == ["garbage", "cache", 40 * GIB]


def test_on_a_cpu_there_is_nothing_to_give_back(happened: list[Any]) -> None:
    assert made(CPU, "").options.free_bytes == 0
    assert happened == [0]


def test_a_device_without_the_room_is_told(happened: list[Any]) -> None:
    with pytest.raises(NodeError, match=r"computes with 44\.0 GB .*; 42\.9 GB are free") as caught:
        made(CUDA, "0", reserve_bytes=41 * GIB)
    assert caught.value.code == "HF404"


def test_sglang_may_fill_all_but_the_reserve() -> None:
    given = arguments(options(("0",), 3 * GIB, 40 * GIB), 1, "")
    assert given["mem_fraction_static"] == pytest.approx(1 - 3 / 40)
    assert given["chunked_prefill_size"] == SERVER_PROFILE.chunk_tokens
    unknown = arguments(options(("0",)), 1, "")
    assert "mem_fraction_static" not in unknown
    on_cpu = arguments(options(()), 1, "")
    assert not {"mem_fraction_static", "chunked_prefill_size"} & on_cpu.keys()


def test_the_reserve_is_a_chunk_of_prompts_or_logits() -> None:
    """Llama 2 7B in bf16 reads 4096 tokens at once: residual, norm, and gate, up and product of its MLP."""
    shape, one = NAMED_SHAPES["llama-7b"], Mesh.of((0,))
    long = Workload(64, 1024, 1024)
    assert SERVER_PROFILE.reserve_bytes(shape, 2, long, one, 64) == 4096 * (2 * 4096 + 3 * 11008) * 2
    short = Workload(4096, 1, 16)
    assert SERVER_PROFILE.reserve_bytes(shape, 2, short, one, 4096) == 4096 * 32000 * (2 + 4)


def test_rows_of_a_full_cache_begin_as_sglang_likes() -> None:
    """A cache with room for all rows at their greatest length leaves nothing to foresee."""
    work = Workload(64, 96, 160)
    assert foresight(8, 8 * 256, work) == 1
    assert "schedule_conservativeness" not in arguments(options(("0",)), 1, "")


@needs_sglang
@pytest.mark.parametrize(("rows", "room"), [(8, 1200), (64, 9000), (64, 15000)])
def test_all_rows_can_begin_at_once(rows: int, room: int) -> None:
    """As SGLang counts: of the running ones the prompts and a share of their greatest responses, and of the
    last one all of it."""
    from sglang.srt.environ import envs

    work = Workload(64, 96, 160)
    share = foresight(rows, room, work)
    assert 0 < share < 1
    given = arguments(replace(options(("0",)), foresight=share), 1, "")
    kept = given["schedule_conservativeness"] * envs.SGLANG_INIT_NEW_TOKEN_RATIO.get()
    assert kept == pytest.approx(share, abs=1e-4)
    needed = (rows - 1) * (96 + kept * 160) + 256
    assert needed <= room < needed + 0.02 * rows * 160 + 256
