"""Cores that a process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

Cores = tuple[int, ...]

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def allowed(quota: Path = QUOTA) -> Cores:
    """What this process may use: the cores it is bound to, and no more than its container's share of time
    (``cpu.max`` of Linux's control groups, such as ``150000 100000``: a core and a half)."""
    cores = sorted(os.sched_getaffinity(0))
    limit, period = quota.read_text().split() if quota.exists() else ("max", "1")
    return tuple(cores) if limit == "max" else tuple(cores[: math.ceil(int(limit) / int(period))])


def share_out(cores: Sequence[int], parts: int) -> list[Cores]:
    """As evenly as can be; where there are fewer cores than parts, some have one together."""
    at = [part * len(cores) // parts for part in range(parts + 1)]
    return [tuple(cores[start : max(stop, start + 1)]) for start, stop in pairwise(at)]
