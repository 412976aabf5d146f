"""Ray's files and token, for one run after another."""

from __future__ import annotations

import inspect
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hflow.diagnostics import HflowError
from hflow.runtime.controller.local_ray import LocalRay
from tests.engines.sglang.servers import temporary_files_in


def test_a_second_run_of_a_process_has_the_first_ones_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reads it once per process, and could not reach its own second cluster with another."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    tokens: list[str] = []
    for _ in range(2):
        ray = LocalRay()
        path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        tokens.append(path.read_text())
        assert path.stat().st_mode & 0o077 == 0
        ray.remove()
        assert not path.exists()
    assert tokens[0] == tokens[1] and len(tokens[0]) == 64


def test_no_place_for_rays_files_is_a_diagnostic(tmp_path: Path) -> None:
    with temporary_files_in(tmp_path / "nowhere"), pytest.raises(HflowError, match="HF404.*nowhere.*No such"):
        LocalRay()


class Started:
    """Processes of a Ray that lives, or does not."""

    def __init__(self, *dead: str) -> None:
        self._dead = list(dead)

    def dead(self) -> list[str]:
        return self._dead


def test_a_node_that_registers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself waits for half a minute, in which its processes may not have started on a busy machine."""
    local = LocalRay()
    session, services = import_module("hflow.runtime.controller.ray_session"), services_of_ray()
    local.remove()
    asked: list[str] = []

    def get_node(_address: str, node: str) -> dict[str, str]:
        asked.append(node)
        if len(asked) % 4:
            raise RuntimeError("not yet")
        return {"node": node}

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(session, "REGISTER_PAUSE_S", 0.01)
    monkeypatch.setattr(session, "ALIVE_PAUSE_S", 0.0)
    with session._waiting_for(Started()):
        assert services.get_node("address", "late") == {"node": "late"} and len(asked) == 4
    assert services.get_node is get_node
    with session._waiting_for(Started("raylet")), pytest.raises(RuntimeError, match="not yet"):
        services.get_node("address", "dead")
    monkeypatch.setattr(session, "START_S", 0.0)
    with session._waiting_for(Started()), pytest.raises(RuntimeError, match="not yet"):
        services.get_node("address", "hangs")


def services_of_ray() -> Any:
    """It asks as it is asked to wait: a later version may do otherwise."""
    assert "services.get_node(" in inspect.getsource(import_module("ray._private.node").Node.__init__)
    return import_module("ray._private.services")


@pytest.mark.slow
def test_workers_are_as_nice_as_who_started_them(workers: Any) -> None:
    """Ray's own default is 15 more: a machine with other load gave them no core for minutes."""
    import ray

    workers.form(1)
    niceness = ray.get([actor.__ray_call__.remote(_niceness) for actor in workers._workers.actors])
    assert set(niceness) == {os.nice(0)}


def _niceness(_actor: Any) -> int:
    return os.nice(0)
