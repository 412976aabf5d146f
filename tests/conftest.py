"""Fixtures for all tests.

Golden texts: ``HFLOW_WRITE_GOLDEN=1 make test`` writes them anew; read the diff afterwards.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import sampling_hooks

if TYPE_CHECKING:
    from tests.engines.processes import Pool

# Read when torch is imported, hence by nothing above. Models of tests are tiny: a second thread waits more
# than it computes, and one that spins takes the core from the tests beside. Inline runs set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("hflow", deadline=None)  # an example on a busy machine takes what it takes
settings.load_profile("hflow")
GOLDEN = Path(__file__).parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(sampling_hooks)
    # A shell ignores SIGINT in what it starts in the background, and so would the runs that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that none of them is still running when all others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes that stay alive between tests."""
    from tests.engines.processes import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with the reviewed one in ``tests/golden/<name>``."""

    def check(name: str, text: str) -> None:
        file = GOLDEN / name
        if os.environ.get("HFLOW_WRITE_GOLDEN"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        assert text + "\n" == file.read_text()

    return check
