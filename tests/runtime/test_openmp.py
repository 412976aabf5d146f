"""Threads of workers sleep soon, unless the user has said how they are to wait."""

from __future__ import annotations

import os

import pytest

from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.openmp import OF_USERS, ROUNDS, VARIABLE, sleep_soon


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OF_USERS:
        monkeypatch.setenv(name, "")  # what the test sets is undone
        monkeypatch.delenv(name)


def test_workers_inherit_it() -> None:
    ray = LocalRay()
    ray.remove()
    assert os.environ[VARIABLE] == ROUNDS


@pytest.mark.parametrize(("name", "value"), [(VARIABLE, "30000"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_user_says_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    sleep_soon()
    assert {own: os.environ[own] for own in OF_USERS if own in os.environ} == {name: value}
