"""pytest's hooks that leave out what a sample does not hold, and say how to repeat it."""

from __future__ import annotations

import os

import pytest

from tests import sampling


def pytest_configure(config: pytest.Config) -> None:
    """The worker processes of xdist take the seed of the first."""
    os.environ[sampling.VARIABLE] = sampling.seed()


def pytest_report_header(config: pytest.Config) -> str:
    name, seed = sampling.VARIABLE, sampling.seed()
    if seed == sampling.ALL:
        return f"sample: every case ({name}={seed})"
    return f"sample: {name}={seed} repeats it, {name}={sampling.ALL} runs every case"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After `-m` and `-k`."""
    seed = sampling.seed()
    dropped = sampling.left_out(items, config.args, seed)
    if seed != sampling.ALL and "acceptance" not in config.option.markexpr:
        dropped |= {item for item in items if item.get_closest_marker("acceptance")}
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
