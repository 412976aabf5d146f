"""A complete choice: a seat for every unit, and within memory the fastest way for each of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hflow.compiler.candidates.node_groups import Unit, Way
from hflow.compiler.planner.seats import Seats, shardings


@dataclass(frozen=True)
class Choice:
    """`ways`: of every node with a model; `step_s`: what the step takes."""

    seats: Seats
    ways: Mapping[str, Way]
    step_s: float


def node_times(units: tuple[Unit, ...], seats: Seats, ways: Mapping[str, Way]) -> dict[str, float]:
    """Seconds of one run of each node, with what it loads and unloads."""
    return {
        node.name: ways[node.name].time_s + seats[unit.name].option.swap_s
        for unit in units
        for node in unit.nodes
    }


def fastest_ways(units: tuple[Unit, ...], seats: Seats, capacity: int) -> dict[str, Way] | None:
    """The fastest way of each node in what memory the others leave it; None where one has none.

    A reader's own copy of the weights is there only while it runs, if it is the only node that reads it; a
    copy that several nodes read stays.
    """
    copies = own_copies(units, seats)
    free: dict[int, int] = {}
    for unit in units:
        staying = seats[unit.name].option.idle_bytes + copies[unit.name].staying
        for resource in seats[unit.name].resources:
            free[resource] = free.get(resource, capacity) - staying
    ways: dict[str, Way] = {}
    for unit in units:
        seat = seats[unit.name]
        limit = min(free[r] for r in seat.resources) - copies[unit.name].passing
        for node, choices in zip(unit.nodes, seat.option.ways):
            way = choices.fastest(limit)
            if way is None:
                return None
            ways[node.name] = way
    return ways


@dataclass(frozen=True)
class CopyBytes:
    """A reader's own weights: `staying` all the time, or `passing`, while its node runs."""

    staying: int = 0
    passing: int = 0


def own_copies(units: tuple[Unit, ...], seats: Seats) -> dict[str, CopyBytes]:
    """By unit; a copy that two units share counts for the first. A reader of older weights has, while it runs
    in the evaluation, a copy of the newest as well; a server of these is always there."""
    lie = shardings(units, seats)
    trained = {(u.model, lie[u.name]) for u in units if u.role == "train"}
    readers = [u for u in units if seats[u.name].option.copy_bytes]
    counts = Counter[object]()
    for unit in readers:
        counts[unit.model, lie[unit.name]] += len(unit.nodes)
    found: dict[str, CopyBytes] = {u.name: CopyBytes() for u in units}
    seen: set[object] = set(trained)
    for unit in readers:
        key, size = (unit.model, lie[unit.name]), seats[unit.name].option.copy_bytes
        if key not in seen:
            found[unit.name] = CopyBytes(staying=size) if counts[key] > 1 else CopyBytes(passing=size)
        seen.add(key)
    for unit in (u for u in units if u.lag and u.evaluated and (u.model, lie[u.name]) not in trained):
        size = seats[unit.name].option.idle_bytes
        found[unit.name] = CopyBytes(staying=size) if unit.served else CopyBytes(passing=size)
    return found
