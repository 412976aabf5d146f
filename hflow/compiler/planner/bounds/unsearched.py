"""Bounds plans outside the search space: those in which some node group is on fewer devices than it tries.

In the search space (`search_space.py`) models share devices wholly or not at all, and a node group runs on
all of its set's, or generates on all of the cluster. A pin can put it anywhere. Where every node group is on
all devices the plan is in the space; so what is left out has some node group on fewer. Whether such a plan
might be shorter than the best of the space is asked of a relaxation that no plan can beat: any candidates, on
any devices; rows and weights move in no time; what others keep in memory is spread evenly, and all devices
together have room for what all keep. Its step lasts as
long as all devices together need for the work, and as long as the recurrence cycles of nodes take
(`bounds.py`) if every node group has devices of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from hflow.compiler.candidates.node_groups import Candidate, NodeGroup
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.search_space import SearchSpace

EFFORT = 3000  # bounds, of about 0.05 ms; what they leave open counts as shorter
Taken = tuple[tuple[NodeGroup, Candidate], ...]


def unsearched(space: SearchSpace, limit_s: float) -> tuple[NodeGroup, ...]:
    """The node groups that are on a part of the devices in some plan which is not in the space and, as far as
    bounds tell, may take less than `limit_s`; those that generate come first."""
    free = sorted(
        (group for group in space.groups if group.name not in space.pinned),
        key=lambda group: group.role != "generate",
    )
    if not free or space.num_devices == 1:
        return ()
    if all(len(partition) > 1 for partition in space.partitions()):
        return tuple(free)  # that all models share all devices is not admitted
    elsewhere = _Elsewhere(space, limit_s)
    return tuple(group for group in free if elsewhere.admits(group))


def pin_apart(space: SearchSpace, group: NodeGroup) -> str:
    """A pin that puts `group` on the last of the devices, at most half of them: ``rollout=@8-15``."""
    total = space.num_devices
    few = [count for count in space.draft.candidates[group.name] if 2 * count <= total]
    first = total - max(few, default=1)
    return f"{group.nodes[0].name}=@{first}" + (f"-{total - 1}" if first < total - 1 else "")


class _Elsewhere:
    """Plans that take less than `limit_s`, wherever node groups are. `least_s` of each node; `least_work`
    and `least_kept` of each node group's devices together, in seconds and in bytes; `least_cycle_s`: with the
    least times; `effort`: bounds so far."""

    def __init__(self, space: SearchSpace, limit_s: float):
        self.space, self.limit_s, self.effort = space, limit_s, 0
        self.total, self.usable = space.num_devices, space.draft.cluster.device.usable_bytes
        self.bounds = Bounds(space.draft)
        self.candidates = {group.name: space.all_candidates(group.name) for group in space.groups}
        self.num_groups = Counter(group.model for group in space.groups)
        self.places = {node.name: (i,) for i, group in enumerate(space.groups) for node in group.nodes}
        alone = {u.name: [_alone(u, c) for c in self.candidates[u.name]] for u in space.groups}
        self.least_s = {
            node.name: min(times[node.name] for times in alone[group.name])
            for group in space.groups
            for node in group.nodes
        }
        self.least_work = {
            group.name: min(map(partial(self._work, group), self.candidates[group.name], alone[group.name]))
            for group in space.groups
        }
        self.least_kept = {name: min(map(_kept_bytes, own)) for name, own in self.candidates.items()}
        self.least_cycle_s = self.bounds.step_s(self.least_s, self.places)

    def admits(self, apart: NodeGroup) -> bool:
        """Whether there may be one with `apart` on a part of the devices."""
        others = [group for group in self.space.groups if group is not apart]
        others.sort(key=lambda group: -self.candidates[group.name][0].least_s)
        few = [candidate for candidate in self.candidates[apart.name] if candidate.num_devices < self.total]
        return any(self._completes((), apart, candidate, others) for candidate in few)

    def _completes(
        self, taken: Taken, group: NodeGroup, candidate: Candidate, left: Sequence[NodeGroup]
    ) -> bool:
        """Whether with `candidate` of `group` as well, and any of all node groups that are left, one may
        be."""
        self.effort += 1
        if self.effort > EFFORT:
            return True
        both = (*taken, (group, candidate))
        if self._bound_s(both) >= self.limit_s:
            return False
        if not left:
            return True
        following, *others = left
        return any(self._completes(both, following, each, others) for each in self.candidates[following.name])

    def _bound_s(self, taken: Taken) -> float:
        """The least time of plans with these candidates, or a number below `limit_s`."""
        kept = {**self.least_kept, **{group.name: _kept_bytes(candidate) for group, candidate in taken}}
        if sum(kept.values()) > self.total * self.usable:
            return float("inf")
        times: dict[str, float] = {}
        for group, candidate in taken:
            own = self._times(group, candidate, taken)
            if own is None:
                return float("inf")
            times.update(own)
        work = {
            **self.least_work,
            **{group.name: self._work(group, candidate, times) for group, candidate in taken},
        }
        busy_s = sum(work.values()) / self.total
        more_s = sum((s - self.least_s[name]) * self.bounds.rounds[name] for name, s in times.items())
        if (
            busy_s >= self.limit_s or self.least_cycle_s + more_s < self.limit_s
        ):  # no recurrence cycle gets longer than so
            return busy_s
        return max(busy_s, self.bounds.step_s({**self.least_s, **times}, self.places))

    def _work(self, group: NodeGroup, candidate: Candidate, times: Mapping[str, float]) -> float:
        """Seconds of all devices together."""
        rounds = self.bounds.rounds
        return candidate.num_devices * sum(times[node.name] * rounds[node.name] for node in group.nodes)

    def _times(self, group: NodeGroup, candidate: Candidate, taken: Taken) -> dict[str, float] | None:
        """Of the node group's nodes, in the memory that others leave at most on its fullest device."""
        others = [c for u, c in taken if u is not group]
        shared = [max(0, candidate.num_devices + c.num_devices - self.total) for c in others]
        beside = sum(c.idle_bytes * count for c, count in zip(others, shared)) // candidate.num_devices
        free_memory = self.usable - candidate.idle_bytes - beside - self._copy_bytes(group, candidate, taken)
        configs = [each.fastest(free_memory) for each in candidate.fronts]
        times = {
            n.name: config.time_s + candidate.swap_s for n, config in zip(group.nodes, configs) if config
        }
        return times if len(times) == len(group.nodes) else None

    def _copy_bytes(self, group: NodeGroup, candidate: Candidate, taken: Taken) -> int:
        """A reader's own copy of the weights, where no other node group of its model can have the same, less
        the trainer's weights that may donate their memory to it."""
        known = [(u, c) for u, c in taken if u.model == group.model and u is not group]
        if not candidate.kept.copy_bytes or len(known) < self.num_groups[group.model] - 1:
            return 0
        donates = self.space.weight_syncs.may_donate(group, (group, *(u for u, _ in known)))
        donated = sum(c.kept.weights for u, c in known if u.role == "train" and donates)
        return max(0, min((candidate.copy_beside(c) for _, c in known), default=0) - donated)


def _kept_bytes(candidate: Candidate) -> int:
    """Of all its devices together, always."""
    return candidate.num_devices * candidate.idle_bytes


def _alone(group: NodeGroup, candidate: Candidate) -> dict[str, float]:
    return {
        node.name: configs.least_s + candidate.swap_s for node, configs in zip(group.nodes, candidate.fronts)
    }
