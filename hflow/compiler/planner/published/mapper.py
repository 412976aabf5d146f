"""HybridFlow's parallel sizes of models (arXiv:2409.19256, Algorithm 2 and get_min_alloc of Algorithm 1).

A model has one (p, t, d) for training and scoring on Megatron, set up as in `megatron_candidates`, without
offload, and with recomputation only where memory asks for it. What the paper leaves open is read so:

- the minimal sizes of models that share devices are those on the fewest that hold one replica of each;
- p and t grow in steps of 1, so those that divide nothing (heads, layers, devices, rows) are skipped; a model
  that cannot use all devices of its set uses the most that it can;
- p goes up to devices / devices per host, or its minimum where that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hflow.compiler.candidates.meshes import sizes
from hflow.compiler.candidates.node_groups import Candidate, Candidates, NodeGroup
from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.placements import Members
from hflow.compiler.planner.published.placed_candidates import megatron_candidates
from hflow.compiler.planner.published.stages import StageTimes, in_turn, stage_times
from hflow.compiler.planner.search_space import SearchSpace

Admits = Callable[[Candidate, Candidate], bool]  # a layout of training, one of generation


def nested(train: Candidate, generate: Candidate) -> bool:
    """Generation on the same devices, with a tensor parallelism that divides that of training. Of the layouts
    that HybridFlow's engine knows these are the ones without stages."""
    return train.num_devices == generate.num_devices and train.tp % generate.tp == 0


@dataclass(frozen=True)
class Least:
    """The fewest devices that hold a set of models: `count`; there each has the `sizes` (p, t), and what they
    keep leaves `free_bytes` for a node that runs."""

    count: int
    sizes: Mapping[str, tuple[int, int]]
    free_bytes: int


@dataclass(frozen=True)
class Mapped:
    """The candidates of the node groups of some models on the same devices, and what they take in each
    stage."""

    candidates: Mapping[str, Candidate]
    times: StageTimes


class Mapper:
    """Algorithm 2, with its answers kept.

    Args:
        generation: the candidates of node groups that generate with a trained model.
        admits: which of them go with which of training.
    """

    def __init__(self, space: SearchSpace, generation: Mapping[str, Candidates], admits: Admits = nested):
        self.space, self.admits, self.rounds = space, admits, space.rounds
        self.capacity = space.draft.cluster.device.usable_bytes
        others = [g for g in space.groups if g.role != "generate"]
        self.candidates = {**megatron_candidates(space.draft, others), **generation}

    def sizes(self, members: Members) -> tuple[int, ...]:
        """Numbers of devices that make a difference to a set of models: the least allocation and more."""
        least, found = self.least(members), {n for m in members for n in self.candidates[self._main(m).name]}
        return tuple(sorted(n for n in found if least and n >= least.count))

    @memoize
    def least(self, members: Members) -> Least | None:
        """The least allocation (get_min_alloc); None where the models fit nowhere."""
        for count in sizes(self.space.draft.cluster):
            whole = {m: c for m in members if (c := self._one_replica(m, count))}
            free_memory = self.capacity - sum(c.idle_bytes for c in whole.values())
            if len(whole) == len(members) and all(self._mapped(m, c, free_memory) for m, c in whole.items()):
                return Least(count, {m: (c.pp, c.tp) for m, c in whole.items()}, free_memory)
        return None

    @memoize
    def on(self, members: Members, count: int) -> Mapped | None:
        """A set of models on `count` devices: training first, then generation in the memory that is left."""
        least = self.least(members)
        if not least or count < least.count:
            return None
        mains = {m: self._auto_parallel(m, count, least.sizes[m], least.free_bytes) for m in members}
        free_memory = self.capacity - sum(c.idle_bytes for c in mains.values())
        found = [mapped for m, c in mains.items() if (mapped := self._mapped(m, c, free_memory))]
        if len(found) < len(members):
            return None
        candidates = {name: candidate for mapped in found for name, candidate in mapped.candidates.items()}
        return Mapped(candidates, in_turn(mapped.times for mapped in found))

    @memoize
    def _auto_parallel(self, model: str, count: int, least: tuple[int, int], free_bytes: int) -> Candidate:
        """Of training and scoring on at most `count` devices, with p and t no less than `least` (p, t)."""
        per_host = self.space.draft.cluster.devices_per_host
        candidates = self.candidates[self._main(model).name]
        for n in sorted((n for n in candidates if n <= count), reverse=True):
            layouts = (c for c in candidates[n] if least[0] <= c.pp <= max(least[0], n // per_host))
            found = [(c, self._mapped(model, c, free_bytes)) for c in layouts if c.tp >= least[1]]
            times = [(sum(mapped.times[1:]), i) for i, (_, mapped) in enumerate(found) if mapped]
            if times:
                return found[min(times)[1]][0]
        raise AssertionError(f"{model} fits on its least devices, so on {count}")

    def _one_replica(self, model: str, count: int) -> Candidate | None:
        """All of `count` devices for one replica, with as much tensor parallelism as possible."""
        candidates = self.candidates[self._main(model).name].get(count, ())
        return max((c for c in candidates if c.dp == 1), key=lambda c: c.tp, default=None)

    def _mapped(self, model: str, main: Candidate, free_bytes: int) -> Mapped | None:
        """The model trained (or, if frozen, used) as `main` says, with its fastest generation; None where a
        node cannot run so."""
        candidates, times = dict[str, Candidate](), list[StageTimes]()
        for group in (g for g in self.space.groups if g.model == model):
            fits = (
                (own, candidate)
                for candidate in self._alternatives(group, main)
                if (own := stage_times(group, candidate, free_bytes - _more(candidate, main), self.rounds))
            )
            best = min(fits, key=lambda fit: sum(fit[0]), default=None)
            if best is None:
                return None
            times.append(best[0])
            candidates[group.name] = best[1]
        return Mapped(candidates, in_turn(times))

    def _alternatives(self, group: NodeGroup, main: Candidate) -> Iterator[Candidate]:
        if group == self._main(group.model):
            yield main
            return
        for candidate in self.candidates[group.name].get(main.num_devices, ()):
            if self.admits(main, candidate) if group.role == "generate" else _alike(main, candidate):
                yield candidate

    def _main(self, model: str) -> NodeGroup:
        """The node group that trains a model, or the only one of a frozen one."""
        return next(g for g in self.space.groups if g.model == model and g.holds)


def _alike(one: Candidate, other: Candidate) -> bool:
    return one.mesh(0) == other.mesh(0)


def _more(candidate: Candidate, main: Candidate) -> int:
    """What a node group keeps beside its model's state: older weights, or a copy in a layout of its own."""
    if candidate is main:
        return 0
    return candidate.idle_bytes + candidate.copy_beside(main)
