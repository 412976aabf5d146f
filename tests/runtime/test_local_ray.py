"""Ray's files and token, for one run after another."""

from __future__ import annotations

import os
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


@pytest.mark.slow
def test_workers_are_as_nice_as_who_started_them(workers: Any) -> None:
    """Ray's own default is 15 more: a machine with other load gave them no core for minutes."""
    import ray

    workers.form(1)
    niceness = ray.get([actor.__ray_call__.remote(_niceness) for actor in workers._workers.actors])
    assert set(niceness) == {os.nice(0)}


def _niceness(_actor: Any) -> int:
    return os.nice(0)
