"""Where workers lie: each of a plan's hosts becomes a bundle of a placement group, so that its workers share
one Ray node. What a cluster lacks is told at once, what it is waited for every few seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from hflow.diagnostics import Diagnostic
from hflow.runtime.controller.pool import DevicesMissing
from hflow.units import plural

GROWTH_WAIT_S = 900.0  # for an autoscaler to bring machines up
TELL_S = 5.0
# What Ray's launchers and KubeRay, which can add nodes, put on theirs; a cluster started by hand has none.
LAUNCHED_LABEL = "ray.io/node-group"

Resources = dict[str, float]


@dataclass(frozen=True)
class Demand:
    """`hosts`: how many workers each of the plan's hosts has, in order of ranks."""

    hosts: tuple[int, ...]
    platform: str

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each worker takes one of."""
        return ("GPU", "CPU") if self.platform == "cuda" else ("CPU",)

    @property
    def bundles(self) -> list[Resources]:
        return [{kind: float(workers) for kind in self.kinds} for workers in self.hosts]

    def room(self, node: Resources) -> int:
        """How many workers a node holds."""
        return int(min(node.get(kind, 0.0) for kind in self.kinds))

    def text(self, machines: Sequence[Resources], noun: str) -> str:
        """``2 hosts with 8 GPU and 8 CPU each``"""
        counts = Counter(" and ".join(f"{m.get(k, 0.0):g} {k}" for k in self.kinds) for m in machines)
        parts = [f"{plural(n, noun)} with {has}{' each' if n > 1 else ''}" for has, n in counts.items()]
        return ", ".join(parts) or f"no {noun}"


def place(demand: Demand, say: Callable[[str], None], wait_s: float, lost: bool) -> PlacementGroup:
    """A placement group with one bundle for each host, on as many nodes where the cluster has them.

    Args:
        wait_s: how long devices that others use, or that were lost, are waited for.
        lost: whether nodes may be missing that were there before.

    Raises:
        DevicesMissing: when the cluster can never hold the workers, or not within `wait_s`. It may grow when
            its nodes say that a launcher started them; then they are waited for `GROWTH_WAIT_S`, if nothing
            was lost.
    """
    nodes = [n for n in ray.nodes() if n["Alive"]]
    may_grow = any(LAUNCHED_LABEL in n["Labels"] for n in nodes)
    has = [n["Resources"] for n in nodes]
    strategy = "STRICT_SPREAD" if may_grow or spreads(demand, has) else "PACK"
    is_held = strategy != "PACK" or packs(demand, has)
    if not is_held and not lost:
        raise _lacking(demand, has)
    if is_held and strategy == "PACK":
        needs, there = demand.text(demand.bundles, "host"), demand.text(has, "node")
        say(f"the plan is for {needs}; the Ray cluster has {there}: hosts will share nodes")
    group = placement_group(demand.bundles, strategy=strategy)
    try:
        _await(group, demand, GROWTH_WAIT_S if may_grow and not lost else wait_s, say)
    except BaseException:
        remove_placement_group(group)  # else it would take the devices that come later
        raise
    return group


def spreads(demand: Demand, nodes: Sequence[Resources]) -> bool:
    """Whether each host finds a node of its own."""
    rooms = sorted((demand.room(node) for node in nodes), reverse=True)
    hosts = sorted(demand.hosts, reverse=True)
    return len(rooms) >= len(hosts) and all(room >= host for room, host in zip(rooms, hosts))


def packs(demand: Demand, nodes: Sequence[Resources]) -> bool:
    """Whether hosts, the largest first, find room beside one another."""
    rooms = [demand.room(node) for node in nodes]
    for host in sorted(demand.hosts, reverse=True):
        rooms.sort()
        at = next((i for i, room in enumerate(rooms) if room >= host), None)
        if at is None:
            return False
        rooms[at] -= host
    return True


def node_names(group: PlacementGroup) -> list[str]:
    """``ADDRESS/NODE`` of each bundle: several Ray nodes may share a machine, and so an address."""
    addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [f"{addresses[nodes[bundle]]}/{nodes[bundle]}" for bundle in range(len(nodes))]


def _await(group: PlacementGroup, demand: Demand, limit_s: float, say: Callable[[str], None]) -> None:
    started = time.monotonic()
    while not group.wait(min(TELL_S, limit_s)):
        waited = time.monotonic() - started
        has = [n["Resources"] for n in ray.nodes() if n["Alive"]]
        if waited >= limit_s:
            raise _lacking(demand, has, f"{_free(demand)} after {waited:.0f} s")
        there = f"the Ray cluster has {demand.text(has, 'node')}, {_free(demand)}"
        say(f"waiting for {demand.text(demand.bundles, 'host')}: {there} ({waited:.0f} of {limit_s:.0f} s)")


def _free(demand: Demand) -> str:
    available: dict[str, Any] = ray.available_resources()
    return " and ".join(f"{available.get(kind, 0.0):g} {kind}" for kind in demand.kinds) + " free"


def _lacking(demand: Demand, nodes: Sequence[Resources], free: str = "") -> DevicesMissing:
    needs, has = demand.text(demand.bundles, "host"), demand.text(nodes, "node")
    message = f"the plan needs {needs}; the Ray cluster has {has}" + (f", {free}" if free else "")
    return DevicesMissing(Diagnostic("HF404", message, help="a plan's host needs a Ray node that holds it"))
