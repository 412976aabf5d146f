"""All plans to choose from: partitions of the models, devices for each set of them, assignments for node
groups.

Where that may miss the best plan, a wider space has node groups `apart`: each shares devices with any others,
not only with those of its model, or runs on all devices of the cluster. All other node groups run on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, combinations, permutations, product

from hflow.compiler.candidates.any_count import candidates_on_any_count
from hflow.compiler.candidates.node_groups import Candidate, NodeGroup, node_groups
from hflow.compiler.candidates.shared_bases import SharedBases, lie_alike, sharing_groups, sharing_models
from hflow.compiler.planner.assignments import Assignment, Assignments
from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.placements import (
    Allocation,
    Colocation,
    Partition,
    partitions,
    set_partitions,
)
from hflow.compiler.planner.weight_syncs import WeightSyncs
from hflow.compiler.program_builder.builder import ProgramBuilder
from hflow.compiler.state import Draft
from hflow.plan.workload import rounds
from hflow.schedule.tasks import device_classes

Devices = tuple[int, ...]


@dataclass(frozen=True)
class SearchSpace:
    """A part (a model; in the wider space, a node group) lies on the devices of its set, a node group on the
    largest part of them on which it can run. Generation may use all devices of the cluster instead. A node
    group whose devices are pinned lies there. `narrow`: the space that this one widens, with what both know
    of programs and weights."""

    draft: Draft
    apart: frozenset[str] = frozenset()
    narrow: SearchSpace | None = field(default=None, compare=False, repr=False)

    @cached_property
    def groups(self) -> tuple[NodeGroup, ...]:
        if self.narrow:
            return self.narrow.groups
        return node_groups(
            self.draft.graph, self.draft.engines, self.draft.evaluation_graph, self.draft.sharing
        )

    @cached_property
    def group_of(self) -> dict[str, str]:
        """The node group of every node with a model."""
        return {node.name: group.name for group in self.groups for node in group.nodes}

    @cached_property
    def rounds(self) -> dict[str, int]:
        """How often each node runs in a step, at least."""
        graph = self.draft.graph
        return {node.name: rounds(graph, node) for node in graph.nodes}

    @cached_property
    def builder(self) -> ProgramBuilder:
        """Builds the program of a step, for its price."""
        return self.narrow.builder if self.narrow else ProgramBuilder(self.draft, self.draft.graph)

    @property
    def num_devices(self) -> int:
        return self.draft.cluster.num_devices

    @property
    def capacity(self) -> int:
        """Bytes of one device that plans may fill."""
        return self.draft.cluster.device.usable_bytes

    @cached_property
    def pinned(self) -> dict[str, tuple[int, ...]]:
        """The devices of node groups that are pinned to some."""
        group_of = self.group_of
        return {group_of[p.node]: p.devices for p in self.draft.pins if p.devices and p.node in group_of}

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The models of which some node group is not pinned, in graph order."""
        free = {u.model for u in self.groups if u.name not in self.pinned}
        return tuple(m.name for m in self.draft.graph.models if m.name in free)

    def part_of(self, group: NodeGroup) -> str:
        """The part that a node group belongs to."""
        return group.name if self.apart else group.model

    @cached_property
    def sharing(self) -> SharedBases:
        """The node groups that hold models of one base, which lie alike."""
        return sharing_groups(self.draft.graph, self.groups)

    def lie_alike(self, assignments: Assignments) -> bool:
        """Whether those do that have assignments."""
        return all(
            lie_alike(assignments[name].sharding for name in names if name in assignments)
            for names in self.sharing
        )

    def partitions(self) -> Iterator[Partition]:
        """Those of the models."""
        graph = self.draft.graph
        pinned = {group.model for group in self.groups if group.holds and group.name in self.pinned}
        together = [models for models in sharing_models(graph) if not pinned & {*models}]
        return partitions(graph, self.models, self.draft.options.placement, together)

    def colocations(self) -> Iterator[Colocation]:
        """All that are to be searched."""
        if self.apart:
            yield from self._wider()
            return
        for partition in self.partitions():
            yield from (Colocation(partition, spread) for spread in self._spreads(partition))

    @memoize
    def candidates(self, group: str, count: int) -> tuple[Candidate, ...]:
        """The candidates of a node group on the most devices, `count` at most, on which it can run."""
        most = max((n for n in self.draft.candidates[group] if n <= count), default=0)
        return self.draft.candidates[group][most] if most else ()

    @memoize
    def all_candidates(self, name: str) -> tuple[Candidate, ...]:
        """The candidates of a node group on all numbers of devices that a pin may give it, the fastest
        first."""
        if name in self.pinned:
            return self.draft.candidates[name].get(len(self.pinned[name]), ())
        group = next(group for group in self.groups if group.name == name)
        return candidates_on_any_count(self.draft, group)

    @cached_property
    def weight_syncs(self) -> WeightSyncs:
        return self.narrow.weight_syncs if self.narrow else WeightSyncs(self.draft, self.groups)

    def free_groups(self, members: Sequence[str]) -> list[NodeGroup]:
        """The node groups of the parts of a set that are not pinned."""
        return [u for u in self.groups if self.part_of(u) in members and u.name not in self.pinned]

    def sizes(self, members: Sequence[str]) -> tuple[int, ...]:
        """Numbers of devices that make a difference to a set, ascending: those on which some node group can
        run, as long as all can run on as many or fewer."""
        own = [self.draft.candidates[u.name] for u in self.free_groups(members)]
        least = max(min(candidates) for candidates in own)
        return tuple(sorted({n for candidates in own for n in candidates if n >= least}))

    def shared_out(self, colocation: Colocation) -> int:
        """The most devices that its sets have together. A set on all devices, beside node groups on all
        devices, is another colocation, in which all are in that set, or a plan of the narrower space."""
        partition, spread, first = colocation
        whole = self.num_devices - (first or 0)
        return whole - 1 if spread and len(partition) == 1 and not first else whole

    def _spreads(self, partition: Partition) -> Iterator[frozenset[str]]:
        """The choices of node groups that run on all devices: any that generate, where models are apart."""
        return _subsets(self._generating if len(partition) > 1 else ())

    def _wider(self) -> Iterator[Colocation]:
        """Those of node groups, each by itself."""
        elsewhere = frozenset(u.name for u in self.groups) - self.apart - {*self.pinned}
        for few in _subsets(u.name for u in self.groups if u.name in self.apart):
            alone = tuple(u.name for u in self.groups if u.name in self.apart - few)
            found = self._in_places(set_partitions(alone) if alone else [])
            every = (Colocation(partition, elsewhere | few, first) for partition, first in found)
            yield from (each for each in every if not self._parts_a_base(each))

    def _parts_a_base(self, colocation: Colocation) -> bool:
        """Whether models that share a base would be trained in places of their own."""
        free = [{*names} for names in self.sharing if not {*names} & self.pinned.keys()]
        places = [{*place} for place in (*colocation.partition, colocation.spread)]
        return any(not any(names <= place for place in places) for names in free)

    def _in_places(self, found: Iterable[Partition]) -> Iterator[tuple[Partition, int | None]]:
        """Beside pinned node groups it matters where sets lie: in any order, from the first device on or from
        where pinned ones begin or end."""
        if not self.pinned:
            yield from ((partition, None) for partition in found)
            return
        ends = {0, *(end for on in self.pinned.values() for end in (on[0], on[-1] + 1))}
        orders = (each for partition in found for each in permutations(partition))
        yield from product(orders, sorted(ends - {self.num_devices}))

    @cached_property
    def _generating(self) -> tuple[str, ...]:
        """The node groups that generate, and are not pinned."""
        return tuple(u.name for u in self.groups if u.role == "generate" and u.name not in self.pinned)

    def assignments(self, allocation: Allocation) -> dict[str, tuple[Assignment, ...]]:
        """For every node group its assignments, the fastest first."""
        ranges = {
            part: (first, count)
            for members, first, count in zip(allocation.partition, allocation.firsts, allocation.counts)
            for part in members
        }
        resources = self._resources(allocation)
        found: dict[str, tuple[Assignment, ...]] = {}
        for group in self.groups:
            if group.name in self.pinned:
                devices = self.pinned[group.name]
            elif group.name in allocation.spread:
                devices = self.draft.cluster.devices
            else:
                devices = _row(*ranges[self.part_of(group)])
            found[group.name] = tuple(self._on(group, devices, resources[devices]))
        return found

    def _on(self, group: NodeGroup, devices: Devices, resources: tuple[int, ...]) -> Iterator[Assignment]:
        for candidate in self.candidates(group.name, len(devices)):
            yield Assignment(candidate, devices[: candidate.num_devices], resources)

    def _resources(self, allocation: Allocation) -> dict[Devices, tuple[int, ...]]:
        """For each place the numbers of the sets of devices, disjoint ones, that it consists of."""
        rows = map(_row, allocation.firsts, allocation.counts)
        places = tuple(dict.fromkeys((*rows, *self.pinned.values(), self.draft.cluster.devices)))
        parts: dict[Devices, list[int]] = {place: [] for place in places}
        for number, members in enumerate(device_classes(places).values()):
            for place in members:
                parts[places[place]].append(number)
        return {place: tuple(numbers) for place, numbers in parts.items()}


def _subsets(names: Iterable[str]) -> Iterator[frozenset[str]]:
    """The smaller ones first."""
    every = tuple(names)
    return map(frozenset, chain.from_iterable(combinations(every, size) for size in range(len(every) + 1)))


@cache
def _row(first: int, count: int) -> Devices:
    return tuple(range(first, first + count))
