"""Clusters whose times are told by closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.plan.cluster import Calibration, Cluster, Link
from hflow.plan.cluster_file import load_cluster


@pytest.fixture
def a100() -> Cluster:
    return load_cluster("a100x8")


@pytest.fixture
def plain(a100: Cluster) -> Cluster:
    """A100s that reach their peak and never wait, and whose trainers pass whole rows."""
    device = replace(a100.device, kernel_latency_s=0.0, calibration=Calibration(1.0, 1.0, 1.0, 1.0))
    return replace(a100, device=device, intra_host=Link(300e9, 0.0), whole_rows=True)
