"""Cores that a process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

Cores = tuple[int, ...]

QUOTA = Path("/sys/fs/cgroup/cpu.max")
CONTAINER = Path("/proc/self/ns/cgroup")  # as an inode, a number of its own for each


def allowed(quota: Path = QUOTA, container: Path = CONTAINER) -> Cores:
    """What this process may use: the cores it is bound to, and no more than its container's share of time
    (``cpu.max`` of Linux's control groups, such as ``150000 100000``: a core and a half). A share of time is
    not of certain cores: each container takes some of its own, rather than all of them the first."""
    cores = sorted(os.sched_getaffinity(0))
    limit, period = quota.read_text().split() if quota.exists() else ("max", "1")
    if limit == "max":
        return tuple(cores)
    first = container.stat().st_ino % len(cores)
    most = math.ceil(int(limit) / int(period))
    return tuple(sorted((cores[first:] + cores[:first])[:most]))


def share_out(cores: Sequence[int], parts: int) -> list[Cores]:
    """As evenly as can be; where there are fewer cores than parts, some have one together."""
    at = [part * len(cores) // parts for part in range(parts + 1)]
    return [tuple(cores[start : max(stop, start + 1)]) for start, stop in pairwise(at)]
