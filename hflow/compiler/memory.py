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
from dataclasses import dataclass, field

from hflow.compiler.state import Draft
from hflow.cost.memory import awake_bytes, weight_bytes
from hflow.plan.engine_registry import profile_of
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import DeviceMemory
from hflow.plan.program import Call, Instruction, Program, Release, SyncWeights, with_bodies
from hflow.plan.replicas import Instance, instance_of
from hflow.plan.workload import workload
from hflow.schedule.tasks import device_classes

Moment = tuple[int, str]  # a node runs: of the step (0) or of the evaluation (1), its name
LabelledBytes = tuple[str, int]  # a label, and bytes


def device_memory(
    draft: Draft, nodes: Iterable[NodePlan], programs: Sequence[Program] = ()
) -> tuple[DeviceMemory, ...]:
    """The peak of every class of devices that are in the same meshes, and the node that runs then.

    Args:
        programs: of the step and the evaluation, in their final order. They tell which copies of weights
            wait for another reader while a node runs, and which trainers donate their memory to them; without
            them, none does.
    """
    plans = {n.node: n for n in nodes}
    users = _users(draft, plans)
    passing = [copy for number, p in enumerate(programs) for copy in _passing(number, p, plans)]
    held = [_held(draft, i, own, [p for p in passing if i in (p.copy, p.donor)]) for i, own in users.items()]
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
    """What of an instance lies on its devices: `more` at some `moments`, `stays` at all others. The memory of
    its weights, of so many bytes, is `donated` at some of these; at the first and the last of them, if that
    is True, only as long as a node runs, not while the weights move."""

    instance: Instance
    stays: LabelledBytes
    more: LabelledBytes
    moments: frozenset[Moment]
    weights: int = 0
    donated: Mapping[Moment, bool] = field(default_factory=dict[Moment, bool])

    def at(self, moment: Moment, working: int) -> LabelledBytes:
        """`working`: the bytes that the node itself needs then."""
        label, size = self.more if moment in self.moments else self.stays
        if moment not in self.donated:
            return label, size
        gone = min(self.weights, working) if self.donated[moment] else self.weights
        return label.removeprefix("weights, ") if gone == self.weights else label, size - gone


@dataclass(frozen=True)
class _Passing:
    """A copy of weights that is there while nodes run. `ends`: of these `moments`, the first and the last.
    `donor`: the trainer's weights that give it their memory."""

    copy: Instance
    moments: tuple[Moment, ...]
    donor: Instance | None

    @property
    def ends(self) -> tuple[Moment, Moment]:
        return self.moments[0], self.moments[-1]


def _users(draft: Draft, plans: Mapping[str, NodePlan]) -> dict[Instance, dict[Moment, NodePlan]]:
    """The plans of the nodes that use each instance."""
    users: dict[Instance, dict[Moment, NodePlan]] = {}
    for number, graph in enumerate(g for g in (draft.graph, draft.evaluation_graph) if g):
        for node in (n for n in graph.nodes if n.model):
            plan = plans[node.name]
            users.setdefault(instance_of(node, plan.sharding), {})[number, node.name] = plan
    return users


def _held(
    draft: Draft, instance: Instance, users: Mapping[Moment, NodePlan], passing: Sequence[_Passing]
) -> _Held:
    """`passing`: where it is a copy, or donates its memory to one."""
    first = next(iter(users.values()))
    what = draft.shapes[instance.model], draft.graph.model(instance.model).dtype, instance.mesh
    trainings = {at: plan for at, plan in users.items() if plan.kind == "train"}
    strategy = next(iter(trainings.values()), first).strategy
    weights, nothing = ("weights", weight_bytes(*what, False, strategy)), ("weights", 0)
    if trainings:
        state = "weights, gradients, Adam", weight_bytes(*what, True, strategy)
        offloaded = all(plan.offload for plan in trainings.values())
        donated = {at: at in p.ends for p in passing for at in p.moments}
        always = weights if offloaded else state
        return _Held(instance, always, state, frozenset(trainings), weights[1], donated)
    platform, trained = draft.cluster.device.platform, bool(draft.graph.trainers(instance.model))
    server = profile_of(first.engine).server
    own = draft.cluster.server_bytes if server else 0  # always there
    if server and not server.sleeps(platform, trained and not instance.lag):
        tokens = max(p.micro_batch * workload(draft.graph.node(p.node)).sequence for p in users.values())
        changes = trained or draft.graph.model(instance.model).refresh is not None
        served = "server", own + awake_bytes(*what, tokens, platform, changes, strategy)
        return _Held(instance, served, served, frozenset())
    if instance.lag:
        older = "older weights", weights[1]
        return _Held(instance, older, older, frozenset())
    if trained:
        waiting = (at for p in passing for at in p.moments)
        asleep, awake = ("server", own), ("server, weights", own + weights[1])
        return _Held(
            instance, *((asleep, awake) if own else (nothing, weights)), frozenset({*users, *waiting})
        )
    offloaded = all(plan.offload for plan in users.values())
    return _Held(instance, nothing if offloaded else weights, weights, frozenset(users))


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
