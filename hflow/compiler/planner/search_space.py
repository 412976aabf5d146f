"""All plans to choose from: partitions of the models, devices for each set of them, assignments for node
groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations

from hflow.compiler.candidates.node_groups import Candidate, NodeGroup, node_groups
from hflow.compiler.candidates.shared_bases import SharedBases, lie_alike, sharing_groups, sharing_models
from hflow.compiler.planner.assignments import Assignment, Assignments
from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.placements import Allocation, Partition, partitions
from hflow.compiler.planner.weight_syncs import WeightSyncs
from hflow.compiler.program_builder.builder import ProgramBuilder
from hflow.compiler.state import Draft
from hflow.plan.workload import rounds
from hflow.schedule.tasks import device_classes

Devices = tuple[int, ...]


@dataclass(frozen=True)
class SearchSpace:
    """A model lies on the devices of its set, a node group on the largest part of them on which it can run.
    Generation may use all devices of the cluster instead. A node group whose devices are pinned lies
    there."""

    draft: Draft

    @cached_property
    def groups(self) -> tuple[NodeGroup, ...]:
        return node_groups(self.draft.graph, self.draft.engines, self.draft.evaluation_graph)

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
        return ProgramBuilder(self.draft, self.draft.graph)

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

    @cached_property
    def sharing(self) -> SharedBases:
        """The node groups that train models of one base, which lie alike."""
        return sharing_groups(self.draft.graph, self.groups)

    def lie_alike(self, assignments: Assignments) -> bool:
        """Whether those do that have assignments."""
        return all(
            lie_alike(assignments[name].sharding for name in names if name in assignments)
            for names in self.sharing
        )

    def partitions(self) -> Iterator[Partition]:
        graph = self.draft.graph
        pinned = {group.model for group in self.groups if group.role == "train" and group.name in self.pinned}
        together = [models for models in sharing_models(graph) if not pinned & {*models}]
        return partitions(graph, self.models, self.draft.options.placement, together)

    @memoize
    def candidates(self, group: str, count: int) -> tuple[Candidate, ...]:
        """The candidates of a node group on the most devices, `count` at most, on which it can run."""
        most = max((n for n in self.draft.candidates[group] if n <= count), default=0)
        return self.draft.candidates[group][most] if most else ()

    @cached_property
    def weight_syncs(self) -> WeightSyncs:
        return WeightSyncs(self.draft, self.groups)

    def free_groups(self, members: Sequence[str]) -> list[NodeGroup]:
        """The node groups of the models of a set that are not pinned."""
        return [u for u in self.groups if u.model in members and u.name not in self.pinned]

    def sizes(self, members: Sequence[str]) -> tuple[int, ...]:
        """Numbers of devices that make a difference to a set, ascending: those on which some node group can
        run, as long as all can run on as many or fewer."""
        own = [self.draft.candidates[u.name] for u in self.free_groups(members)]
        least = max(min(candidates) for candidates in own)
        return tuple(sorted({n for candidates in own for n in candidates if n >= least}))

    def spreads(self, partition: Partition) -> tuple[frozenset[str], ...]:
        """The choices of node groups that run on all devices: any that generate, where models are apart."""
        groups = [u.name for u in self.groups if u.role == "generate" and u.name not in self.pinned]
        if len(partition) < 2:
            return (frozenset(),)
        subsets = (combinations(groups, size) for size in range(len(groups) + 1))
        return tuple(frozenset(names) for each in subsets for names in each)

    def assignments(self, allocation: Allocation) -> dict[str, tuple[Assignment, ...]]:
        """For every node group its assignments, the fastest first."""
        ranges = {
            model: (first, count)
            for members, first, count in zip(allocation.partition, allocation.firsts, allocation.counts)
            for model in members
        }
        resources = self._resources(allocation)
        found: dict[str, tuple[Assignment, ...]] = {}
        for group in self.groups:
            if group.name in self.pinned:
                devices = self.pinned[group.name]
            elif group.name in allocation.spread:
                devices = self.draft.cluster.devices
            else:
                devices = _row(*ranges[group.model])
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


@cache
def _row(first: int, count: int) -> Devices:
    return tuple(range(first, first + count))
