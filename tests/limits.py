"""A limit on the memory of the process of the tests."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_limited_to(more: int) -> Iterator[None]:
    """Within, this process may take `more` bytes of address space than it has; then it gets MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = re.search(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert size
    resource.setrlimit(resource.RLIMIT_AS, (int(size[1]) * 1024 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
