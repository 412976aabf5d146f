"""Layouts of rows."""

from __future__ import annotations

from hflow.plan.layout import Layout, Mesh, Replicate, Shard


def rows_layout(mesh: Mesh) -> Layout:
    """Rows split over ``dp``, present on every rank of a data-parallel replica."""
    return Layout(mesh, (Replicate(), Shard(0), Replicate()))
