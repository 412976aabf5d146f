"""What pictures and tables call the things that take more than one step, or more than one round of it."""

from __future__ import annotations

from hflow.graph.graph import Graph, Input, Model, Region
from hflow.view import units


def rule(region: Region) -> str:
    """How long a region goes on: ``until 128 rows kept, ≤ 16 rounds``."""
    return f"until {region.rows} rows kept, ≤ {units.plural(region.times, 'round')}"


def age(model: Model, lag: int) -> str:
    """Which weights a reader sees: ``1 update old``, ``every 50 steps``; empty for the newest."""
    if model.refresh:
        return f"every {units.plural(model.refresh.every, 'step')}"
    return f"{units.plural(lag, 'update')} old" if lag else ""


def carried(value: Input) -> str:
    """Of an input that was made in an earlier step: ``lag 1, init 0``."""
    return f"lag {value.lag}, init {value.init:g}"


def all_carried(graph: Graph) -> list[str]:
    """All values that cross steps, with their readers: ``dual.weight -> advantages, lag 1, init 0``."""
    late = [(node, value) for node, value in graph.edges() if value.lag]
    return [f"{value.source} -> {node.name}, {carried(value)}" for node, value in late]
