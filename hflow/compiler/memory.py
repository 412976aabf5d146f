"""Memory over time: what lies on a device while each node runs there.

While a node runs, a device holds what stays of every model (frozen weights; a trained model's weights,
gradients and optimizer; older weights that a reader keeps), and what the node itself needs: its working set,
what it has onloaded, and its own copy of weights that are trained elsewhere, which comes before its first
reader and is dropped after its last. A trainer that donates its weights' memory to such a copy has them only
while they move: before the first reader's working set is there, and after the last one's is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hflow.compiler.state import Draft
from hflow.cost.instances import Moment, instance_residency, instance_users
from hflow.cost.residency import LabelledBytes, Residency
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import DeviceMemory
from hflow.plan.program import Call, Instruction, Program, Release, SyncWeights, with_bodies
from hflow.plan.replicas import Instance, instance_of
from hflow.schedule.tasks import device_classes


def device_memory(
    draft: Draft, nodes: Iterable[NodePlan], programs: Sequence[Program] = ()
) -> tuple[DeviceMemory, ...]:
    """The peak of every class of devices that are in the same meshes, and the node that runs then.

    Args:
        programs: of the step and the evaluation, in their final order. They tell which copies of weights
            wait for another reader while a node runs, and which trainers donate their memory to them; without
            them, none does.
    """
    nodes = [*nodes, *(node for named in draft.evaluations for node in named.nodes)]
    plans = {n.node: n for n in nodes}
    users = instance_users(draft.graphs, plans.values())
    passing = [copy for number, p in enumerate(programs) for copy in _passing(number, p, plans)]
    held = [_held(draft, instance, users, passing) for instance in users]
    meshes = list(dict.fromkeys(i.mesh.devices for i in users))
    found: list[DeviceMemory] = []
    for devices, member_of in device_classes(meshes).items():
        here = [h for h in held if meshes.index(h.instance.mesh.devices) in member_of]
        runs = {at: plan for h in here for at, plan in users[h.instance].items()}
        parts = {at: _parts(here, at, plan) for at, plan in sorted(runs.items())}
        worst = max(parts, key=lambda at: sum(parts[at].values()))
        capacity = min(draft.cluster.kind(d).usable_bytes for d in devices)
        peak = sum(parts[worst].values())
        found.append(DeviceMemory(devices, peak, capacity, dict(parts[worst]), worst[1]))
    return tuple(found)


@dataclass(frozen=True)
class _Held:
    """What of an instance lies on its devices: `kept`, in use at some `moments`. `donated`: the moments at
    which the weights' memory is given away; True where a reader of the copy runs. There weights also move,
    so at most the reader's working set is saved."""

    instance: Instance
    kept: Residency
    moments: frozenset[Moment]
    donated: Mapping[Moment, bool]

    def at(self, moment: Moment, working: int) -> LabelledBytes:
        """`working`: the bytes that the node itself needs then."""
        there, weights = self.kept.in_use if moment in self.moments else self.kept.always, self.kept.weights
        if moment not in self.donated:
            return there
        return self.kept.without(there, min(weights, working) if self.donated[moment] else weights)


@dataclass(frozen=True)
class _Passing:
    """A copy of weights that is there while nodes run. `donor`: the trainer's weights that give it their
    memory."""

    copy: Instance
    moments: tuple[Moment, ...]
    donor: Instance | None


def _held(
    draft: Draft,
    instance: Instance,
    users: Mapping[Instance, Mapping[Moment, NodePlan]],
    passing: Sequence[_Passing],
) -> _Held:
    """Weights move before the first reader of a copy and after its last one, on whose devices other nodes
    may not run."""
    donated = {at: at in users[p.copy] for p in passing if p.donor == instance for at in p.moments}
    waiting = (at for p in passing if p.copy == instance for at in p.moments)
    own = users[instance]
    trainings = frozenset(at for at, plan in own.items() if plan.kind == "train")
    kept = instance_residency(draft.graph, draft.shapes, draft.cluster, instance, users)
    return _Held(instance, kept, trainings or frozenset({*own, *waiting}), donated)


def _parts(here: Sequence[_Held], moment: Moment, plan: NodePlan) -> Counter[str]:
    """What lies on a device with the instances `here` while the node of `plan` runs, by label."""
    parts: Counter[str] = Counter()
    for held in here:
        label, size = held.at(moment, plan.memory_bytes)
        parts[f"{held.instance.model} {label} ({held.instance.mesh.short_text})"] += size
    parts[f"{plan.node} working set"] += plan.memory_bytes
    return +parts


def _passing(number: int, program: Program, plans: Mapping[str, NodePlan]) -> Iterator[_Passing]:
    """The copies of weights that are there for a while, with the nodes that run meanwhile."""
    released = {i.node for i in program.instructions if isinstance(i, Release)}
    begun: dict[str, list[Moment]] = {}
    for instruction in program.instructions:
        reader = instruction.node
        if isinstance(instruction, SyncWeights) and reader in released:
            begun[reader] = []
        elif isinstance(instruction, Release):
            copy = instance_of(program.graph.node(reader), plans[reader].sharding)
            yield _Passing(copy, tuple(begun.pop(reader)), _donor(instruction, program, plans))
        for moments in begun.values():
            moments += [(number, name) for name in _called(instruction)]


def _donor(release: Release, program: Program, plans: Mapping[str, NodePlan]) -> Instance | None:
    if not release.donates:
        return None
    edge = program.donating_edge(release.node)
    trainer = plans[edge.source].model
    assert trainer
    return Instance(trainer, edge.source_sharding)


def _called(instruction: Instruction) -> list[str]:
    """The nodes that an instruction calls, in a loop those of its body."""
    return [i.node for i in with_bodies([instruction]) if isinstance(i, Call)]
