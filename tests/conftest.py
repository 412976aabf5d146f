from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.processes import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes that stay alive between tests."""
    pool = Pool()
    yield pool
    pool.close()
