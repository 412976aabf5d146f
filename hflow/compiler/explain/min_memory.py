"""The least memory with which a plan does that has each model in one place, and the plan that needs it: not
how fast it is.

What a device of a set holds at most is what stays there of all node groups, and what the neediest node needs
beside it. So of the candidates of a node group only those count that no other beats in both, and of two node
groups together again only those pairs. Generation on all devices while its model lies on a part of them is
left out: sets of all models on all devices, which need least as a rule, contain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf

from hflow.compiler.candidates.node_groups import Candidate, NodeGroup
from hflow.compiler.candidates.shared_bases import by_layout, sharing_models
from hflow.compiler.donation import lies_in
from hflow.compiler.planner.assignments import Assignment, sharding_of
from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.placements import Partition
from hflow.compiler.planner.search_space import SearchSpace
from hflow.cost.residency import SHARED, OwnCopy


@dataclass(frozen=True)
class GroupMemory:
    """What a node group in one of its candidates holds on a device: `idle_bytes` always, and `need_bytes`
    beside that while its neediest node runs; both with its own `copy` of weights."""

    group: NodeGroup
    candidate: Candidate
    copy: OwnCopy

    @property
    def idle_bytes(self) -> int:
        return self.candidate.idle_bytes + self.copy.staying

    @property
    def need_bytes(self) -> int:
        return self.copy.with_node(self.candidate.least_bytes) - self.copy.staying


@dataclass(frozen=True)
class DeviceLoad:
    """What lies on each device of a set: `idle_bytes` always, and at most `need_bytes` beside that."""

    idle_bytes: int
    need_bytes: int
    held: tuple[GroupMemory, ...]

    @property
    def peak_bytes(self) -> int:
        return self.idle_bytes + self.need_bytes

    @property
    def neediest(self) -> GroupMemory:
        return max(self.held, key=lambda held: held.need_bytes)


@dataclass(frozen=True)
class MinMemoryPlan:
    """A partition of the models, the number of devices of each set and what lies on them."""

    partition: Partition
    counts: tuple[int, ...]
    loads: tuple[DeviceLoad, ...]

    @property
    def fullest(self) -> DeviceLoad:
        return max(self.loads, key=lambda load: load.peak_bytes)


Ladder = Sequence[tuple[int, DeviceLoad]]  # more and more devices, with less and less on each


def min_memory(space: SearchSpace) -> MinMemoryPlan | None:
    """The plan whose fullest device holds least, with each model in one place; None where the placement asks
    for more devices than there are. No node group of `space` is pinned to devices."""

    ladder = _Ladders(space).of
    found = (_shared_out(list(map(ladder, p)), p, space.num_devices) for p in space.partitions())
    return min(filter(None, found), key=lambda plan: plan.fullest.peak_bytes, default=None)


def _shared_out(ladders: Sequence[Ladder], partition: Partition, total: int) -> MinMemoryPlan | None:
    """Sets begin with the fewest devices; whichever holds most gets more, as long as there are any."""
    steps, best = [0] * len(ladders), None
    while True:
        counts, loads = zip(*(ladder[step] for ladder, step in zip(ladders, steps)))
        if sum(counts) > total:
            return best
        best = MinMemoryPlan(partition, counts, loads)
        fullest = loads.index(best.fullest)
        steps[fullest] += 1
        if steps[fullest] == len(ladders[fullest]):
            return best


class _Ladders:
    """Those of sets of models, kept: the same models are in many partitions."""

    def __init__(self, space: SearchSpace):
        self.space = space

    @memoize
    def of(self, members: tuple[str, ...]) -> Ladder:
        found: list[tuple[int, DeviceLoad]] = []
        for count in self.space.sizes(members):
            least = min(self._of_models(members, count), key=lambda load: load.peak_bytes)
            if not found or least.peak_bytes < found[-1][1].peak_bytes:
                found.append((count, least))
        return found

    def _of_models(self, members: Sequence[str], count: int) -> list[DeviceLoad]:
        sharing = [m for m in sharing_models(self.space.draft.graph) if {*m} <= {*members}]
        alone = {*members}.difference(*sharing)
        apart = (self._of_model(model, count) for model in members if model in alone)
        return reduce(_together, (*apart, *(self._of_sharing(models, count) for models in sharing)))

    @memoize
    def _of_sharing(self, models: tuple[str, ...], count: int) -> list[DeviceLoad]:
        """Of models that share a base, and so lie in one layout."""
        found: list[DeviceLoad] = []
        holders = (self._candidates(self._holder(model), count) for model in models)
        for same in by_layout(holders):
            found += reduce(_together, (self._of_model(m, count, tuple(own)) for m, own in zip(models, same)))
        return _undominated(found)

    @memoize
    def _of_model(self, model: str, count: int, trainers: tuple[Candidate, ...] = ()) -> list[DeviceLoad]:
        """`trainers`: those of its trainer's candidates, or of a frozen model's, that may be taken; all, if
        none are given."""
        space = self.space
        groups = space.free_groups((model,))
        trainer = next((group for group in groups if group.role == "train"), None)
        if trainer is None:
            own = ((g, trainers or space.candidates(g.name, count)) for g in groups)
            return reduce(_together, (_alone(group, each, 1) for group, each in own))
        readers = [(g, space.candidates(g.name, count)) for g in groups if g is not trainer]
        nodes = {group.name: space.weight_syncs.num_meanwhile(group) for group, _ in readers}
        copies = [_alone(group, each, nodes[group.name]) for group, each in readers]
        found: list[DeviceLoad] = []
        for candidate in trainers or space.candidates(trainer.name, count):
            trained = [_load(trainer, candidate)]
            shared = [[_load(g, c) for c in each if not c.copy_beside(candidate)] for g, each in readers]
            without = [[*own, *same] for own, same in zip(copies, shared)]
            found += reduce(_together, without, trained)
            for number, (group, each) in enumerate(readers):
                if nodes[group.name] == 1 and space.weight_syncs.may_donate(group, groups):
                    whole = (load.need_bytes for load in without[number] if not load.idle_bytes)
                    least = min(whole, default=inf)
                    loads = _donating_loads(space, group, each, candidate, least)
                    others = shared[:number] + shared[number + 1 :]
                    found += reduce(_together, others, _together(trained, loads))
        return _undominated(found)

    def _holder(self, model: str) -> NodeGroup | None:
        return next((g for g in self.space.free_groups((model,)) if g.holds), None)

    def _candidates(self, group: NodeGroup | None, count: int) -> tuple[Candidate, ...]:
        return self.space.candidates(group.name, count) if group else ()


def _alone(group: NodeGroup, candidates: Iterable[Candidate], nodes: int) -> list[DeviceLoad]:
    """With its own copy of weights that are trained elsewhere, while which so many nodes run."""
    return _undominated(_load(group, c, c.kept.own_copy(nodes)) for c in candidates)


def _donating_loads(
    space: SearchSpace, group: NodeGroup, candidates: Iterable[Candidate], trainer: Candidate, enough: float
) -> list[DeviceLoad]:
    """The least with its own copy of weights to which `trainer` donates its memory, if that is less than
    `enough`."""
    apart = [c for c in candidates if c.copy_beside(trainer)]
    copies = [c.kept.own_copy(donated=trainer.kept.weights) for c in apart]
    needs = [copy.with_node(c.least_bytes) for copy, c in zip(copies, apart)]
    donor = Assignment(trainer, trainer.mesh(0).devices, ())
    layers = space.draft.shapes[group.model].num_layers
    for need, number in sorted((need, number) for number, need in enumerate(needs)):
        if need >= enough:
            break
        reader = Assignment(apart[number], apart[number].mesh(0).devices, ())
        if lies_in(trainer.sharding(donor.mesh), sharding_of(group, reader, donor), layers):
            return [_load(group, apart[number], copies[number])]
    return []


def _load(group: NodeGroup, candidate: Candidate, copy: OwnCopy = SHARED) -> DeviceLoad:
    held = GroupMemory(group, candidate, copy)
    return DeviceLoad(held.idle_bytes, held.need_bytes, (held,))


def _together(some: Iterable[DeviceLoad], others: Sequence[DeviceLoad]) -> list[DeviceLoad]:
    return _undominated(
        DeviceLoad(a.idle_bytes + b.idle_bytes, max(a.need_bytes, b.need_bytes), (*a.held, *b.held))
        for a in some
        for b in others
    )


def _undominated(loads: Iterable[DeviceLoad]) -> list[DeviceLoad]:
    kept: list[DeviceLoad] = []
    for load in sorted(loads, key=lambda load: (load.need_bytes, load.idle_bytes)):
        if not kept or load.idle_bytes < kept[-1].idle_bytes:
            kept.append(load)
    return kept
