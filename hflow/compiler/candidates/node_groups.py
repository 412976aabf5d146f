"""What is planned together: nodes that run on one mesh, and how each of them can run there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hflow.cost.residency import Residency, Use
from hflow.graph.ir import Graph, Node, step_node
from hflow.plan.engine_profile import EngineProfile
from hflow.plan.engine_registry import DEFAULT_ENGINE, GenerationEngine, profile_of
from hflow.plan.frozen import ALL_TRAINED, TrainedWith, trained_with
from hflow.plan.layout import Mesh
from hflow.plan.row_lengths import UNSTATED, RowLengths, row_lengths
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload, workload

GroupRole = Literal["train", "generate", "score", "frozen"]


@dataclass(frozen=True)
class NodeGroup:
    """The nodes that train a model (they share its optimizer), that generate or that score with one which is
    trained (each set has one copy of its weights at most; those that use its `base` are a set), or all that
    use a frozen one. `evaluated`: the evaluation runs one of them too, with the newest weights whatever their
    `lag`. `engine`: of its generate nodes; those of two engines are two node groups, since these share no
    weights. `trained`: how the model is, if any node trains it. `lengths`: of each
    node's rows; empty: all count at the greatest."""

    name: str
    model: str
    role: GroupRole
    nodes: tuple[Node, ...]
    lag: int = 0
    evaluated: bool = False
    engine: GenerationEngine = DEFAULT_ENGINE
    trained: TrainedWith = ALL_TRAINED
    base: bool = False
    lengths: tuple[RowLengths, ...] = ()

    @cached_property
    def works(self) -> tuple[Workload, ...]:
        """Of each node."""
        return tuple(map(workload, self.nodes, self.lengths or [UNSTATED] * len(self.nodes)))

    @property
    def profile(self) -> EngineProfile:
        return profile_of(self.engine)

    @property
    def use(self) -> Use:
        return "read" if self.role == "generate" or self.role == "score" else self.role

    @property
    def holds(self) -> bool:
        """Whether it decides where the model itself lies, of which others have copies."""
        return self.role in ("train", "frozen")

    @property
    def shares_forward(self) -> bool:
        """Whether a score node of it shares its forward pass with the training."""
        return self.role == "train" and any(node.op == "score" for node in self.nodes)

    @property
    def served(self) -> bool:
        """Whether a server generates, whose weights nobody else can use."""
        return self.profile.server is not None


@dataclass(frozen=True)
class ExecConfig:
    """How a node may run on a mesh: `need_bytes` beside what stays on a device, while it runs."""

    need_bytes: int
    time_s: float
    micro_batch: int
    recompute: Literal["none", "full"] = "none"


@dataclass(frozen=True)
class ParetoFront:
    """The configurations of one node that no other beats in both time and memory, by rising memory."""

    configs: tuple[ExecConfig, ...]

    @cached_property
    def _needs(self) -> list[int]:
        return [config.need_bytes for config in self.configs]

    def fastest(self, limit_bytes: int) -> ExecConfig | None:
        """The fastest that needs no more than `limit_bytes`."""
        number = bisect_right(self._needs, limit_bytes)
        return self.configs[number - 1] if number else None

    @property
    def least_bytes(self) -> int:
        return self.configs[0].need_bytes

    @property
    def least_s(self) -> float:
        return self.configs[-1].time_s


@dataclass(frozen=True, eq=False)  # each is built once, and so is a key as the object that it is
class Candidate:
    """A node group on `pp` x `dp` x `cp` x `tp` devices.

    `kept`: what of the model stays on each device. `swap_s`: onload before and offload after each run.
    `fronts`: of each of its nodes; what is loaded while it runs is a part of what it needs.
    """

    pp: int
    dp: int
    cp: int
    tp: int
    strategy: Strategy
    kept: Residency
    swap_s: float
    fronts: tuple[ParetoFront, ...]

    @cached_property
    def idle_bytes(self) -> int:
        """What stays while other nodes run, beside a reader's own copy of weights."""
        return self.kept.always.size

    @property
    def offload(self) -> bool:
        return self.kept.loaded_bytes > 0

    @cached_property
    def num_devices(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @cached_property
    def least_s(self) -> float:
        """The least time of all nodes together."""
        return sum(front.least_s + self.swap_s for front in self.fronts)

    @cached_property
    def least_bytes(self) -> int:
        """What the neediest node needs at least."""
        return max(front.least_bytes for front in self.fronts)

    def mesh(self, first: int) -> Mesh:
        devices = tuple(range(first, first + self.num_devices))
        return Mesh.of(devices, pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    def sharding(self, mesh: Mesh) -> Sharding:
        return Sharding.of(mesh, self.strategy)

    @cached_property
    def lies(self) -> Sharding:
        """As if its devices were the first."""
        return self.sharding(self.mesh(0))

    def copy_beside(self, trainer: Candidate | None) -> int:
        """Bytes of its own copy of weights, on the trainer's devices or (None) elsewhere."""
        return 0 if trainer and trainer.lies == self.lies else self.kept.copy_bytes


Candidates = Mapping[int, tuple[Candidate, ...]]  # by number of devices


def node_groups(
    graph: Graph,
    engines: Mapping[str, GenerationEngine],
    evaluation: Graph | None,
    sharing: Collection[str] = (),
) -> tuple[NodeGroup, ...]:
    """The node groups of a graph, in the order of their first nodes.

    Args:
        engines: of its generate nodes.
        evaluation: the graph that evaluates it; its named evaluations it has itself.
        sharing: the score nodes that share their forward pass with the training of their model.
    """
    members: dict[tuple[str, GroupRole, int, bool, GenerationEngine, bool], list[Node]] = {}
    for node in (n for n in graph.nodes if n.model):
        engine, use = engines.get(node.name, DEFAULT_ENGINE), node.model_use
        role = "train" if node.name in sharing else _role(graph, node)
        key = use.model, role, use.lag, node.in_flight, engine, use.base
        members.setdefault(key, []).append(node)
    again = {n.name for n in evaluation.nodes} if evaluation else set[str]()
    again |= {step_node(n.name) for named in graph.evaluations for n in named.nodes}
    return tuple(
        NodeGroup(
            nodes[0].name, model, role, tuple(nodes), lag, any(n.name in again for n in nodes), engine,
            trained_with(graph, model), base, tuple(row_lengths(graph, n) for n in nodes),
        )
        for (model, role, lag, _, engine, base), nodes in members.items()
    )  # fmt: skip


def _role(graph: Graph, node: Node) -> GroupRole:
    if not graph.trainers(node.model_use.model):
        return "frozen"
    return "train" if node.op == "train" else "generate" if node.op == "generate" else "score"
