"""The Plan: who computes what, where, in which layout, and what moves. Frozen; round-trips as JSON.

A plan belongs to one Graph on one Cluster. The runtime executes exactly what it says and looks at
nothing else: neither the passes nor the search that found it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from hflow.diagnostics import Span
from hflow.display import Displayed
from hflow.graph.adapter import AnyAdapter
from hflow.graph.ir import Graph, Model, Node
from hflow.plan.cluster import Cluster, DeviceKind
from hflow.plan.digests import Digests
from hflow.plan.edges import Edge, WeightEdge
from hflow.plan.engine_registry import GenerationEngine
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import NodePlan
from hflow.plan.program import Program
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import Strategy
from hflow.plan.techniques import NO_TECHNIQUES
from hflow.whole_file import write_whole

VERSION = 7  # of the file
_LATER = frozenset(
    (
        "scaling",
        "window",
        "latent",
        "adapter",
        "rotary_dim",
        "activation",
        "query_scalar",
        "attention_cap",
        "logit_cap",
        "offset_norms",
        "post_norms",
        "scaled_embedding",
        "output_bias",
        "sinks",
    )
)  # fields of shapes that plans say only where they are not the default


@dataclass(frozen=True)
class DeviceMemory:
    """The predicted peak on a set of devices, by what holds it, and the node that runs then."""

    devices: tuple[int, ...]
    peak_bytes: int
    capacity_bytes: int
    parts: Mapping[str, int]
    node: str = ""


@dataclass(frozen=True)
class TriedEngines:
    """The shortest step with these engines, as pairs of a generate node and its engine; None: there is no
    plan. `reason`: why there is none, or why it could not be run where the one that was chosen can."""

    engines: tuple[tuple[str, GenerationEngine], ...]
    step_time_s: float | None
    reason: str = ""


@dataclass(frozen=True)
class TriedSharing:
    """The shortest step in which each score node of `pairs` has one forward pass with a train node
    (`hflow.plan.shared_forward`); None: there is no such plan, for a `reason`."""

    pairs: tuple[tuple[str, str], ...]
    step_time_s: float | None
    reason: str = ""


@dataclass(frozen=True)
class Search:
    """How the plan was found. `explored`: complete plans that were priced. `bound_s`: no plan has a shorter
    step; `gap`: by what part of the step's time the plan may be worse than the best one; None when that is
    not proven, because the planner proves nothing, or because plans that were not searched may be shorter:
    those with nodes `unsearched` on other devices, as `try_pin` puts one. `searched_gap`: the same as `gap`,
    of the plans that were searched. `tried_engines`: where engines were chosen by their price. `pinned`:
    nodes of the step of which a pin says something, in all plans that were searched. `tried_sharing`: where
    plans with shared forward passes were searched, too."""

    explored: int
    gap: float | None
    bound_s: float = 0.0
    planner: str = "exact"
    unsearched: tuple[str, ...] = ()
    try_pin: str = ""
    searched_gap: float | None = None
    tried_engines: tuple[TriedEngines, ...] = ()
    pinned: tuple[str, ...] = ()
    tried_sharing: TriedSharing | None = None


@dataclass(frozen=True)
class EvaluationPlan:
    """A named evaluation: its program, and the plans of its nodes, on the meshes of the nodes of the step
    that they stand for unless they are pinned. `time_s`: of one evaluation."""

    name: str
    program: Program
    nodes: tuple[NodePlan, ...]
    time_s: float = 0.0


@dataclass(frozen=True)
class Plan(Displayed):
    """`step` runs every step; `evaluation` runs the held-out rows through the same nodes' plans, each of
    `evaluations` its own rows through plans of its own. `digests`: of the files of models, functions and
    chats that the graph was compiled with."""

    version: int
    cluster: Cluster
    shapes: Mapping[str, ModelShape]
    nodes: tuple[NodePlan, ...]
    step: Program
    evaluation: Program | None
    memory: tuple[DeviceMemory, ...]
    step_time_s: float
    tokens_per_step: int
    search: Search
    digests: Digests
    evaluations: tuple[EvaluationPlan, ...] = ()

    @property
    def graph(self) -> Graph:
        return self.step.graph

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """Of `programs`."""
        return tuple(program.graph for program in self.programs)

    @property
    def programs(self) -> tuple[Program, ...]:
        """Of the step, of the evaluation if there is one, and of the named evaluations."""
        own = (self.step, self.evaluation) if self.evaluation else (self.step,)
        return (*own, *(named.program for named in self.evaluations))

    def evaluating(self, name: str) -> Program:
        """The program of a named evaluation; without a name, of the one that has none."""
        found = (
            next((e.program for e in self.evaluations if e.name == name), None) if name else self.evaluation
        )
        assert found, name
        return found

    @property
    def all_nodes(self) -> tuple[NodePlan, ...]:
        """Of the step, and of the named evaluations."""
        return (*self.nodes, *(node for named in self.evaluations for node in named.nodes))

    @cached_property
    def _nodes(self) -> dict[str, NodePlan]:
        return {n.node: n for n in self.all_nodes}

    def node(self, name: str) -> NodePlan:
        return self._nodes[name]

    @property
    def devices(self) -> tuple[int, ...]:
        """Those on which anything runs, evaluations included."""
        return tuple(sorted({d for n in self.all_nodes for d in n.mesh.devices}))

    @cached_property
    def hash(self) -> str:
        """The first 12 hex digits of SHA-256 over what was decided: without places in files, source text and
        digests of files, whatever the version of the file, and however it was found."""
        step, evaluation = map(_without_places, (self.step, self.evaluation))
        named = tuple(replace(e, program=_bare(e.program)) for e in self.evaluations)
        own = replace(self, step=step, evaluation=evaluation, evaluations=named)
        text = to_json(own, {"version", "digests", "search"})
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def save(self, path: Path) -> None:
        """Write the plan as JSON, whole or not at all. Raises HflowError HF306 when that is not possible."""
        write_whole(path, to_json(self) + "\n", "HF306")


def to_json(plan: Plan, leave_out: Set[str] = frozenset()) -> str:
    """`leave_out`: fields of the plan. Graphs without named evaluations, adapters or files of chats do not
    say so, nor do shapes without scaled rotary positions, windows or latent attention, nor nodes without
    lengths, sequence parallelism, interleaved stages or KV caches with pages, nor clusters whose engines take
    no time of the host, or whose devices decode at the rate of prompts: their plans are those from before."""
    from pydantic import TypeAdapter

    without: dict[str, Any] = dict.fromkeys(leave_out, True)
    without["nodes"] = _plain(plan.nodes)
    if "cluster" not in leave_out:
        without["cluster"] = _unsaid_of_cluster(plan.cluster)
    named = {
        i: {"nodes": _plain(e.nodes), "program": _unsaid_of_program(e.program)}
        for i, e in enumerate(plan.evaluations)
    }
    without["evaluations"] = named or True
    without["shapes"] = {name: _unsaid_of_shape(shape) for name, shape in plan.shapes.items()}
    if not plan.digests.chats and "digests" not in leave_out:
        without["digests"] = {"chats": True}
    without["step"] = _unsaid_of_program(plan.step, named=bool(plan.evaluations))
    if plan.evaluation:
        without["evaluation"] = _unsaid_of_program(plan.evaluation, named=False)
    return TypeAdapter(Plan).dump_json(plan, exclude=without).decode()


def _unsaid_of_cluster(cluster: Cluster) -> dict[str, Any]:
    kinds = {"device": _unsaid_of_kind(cluster.device)}
    more = {i: {"device": _unsaid_of_kind(group.device)} for i, group in enumerate(cluster.more)}
    unsaid = {
        "token_step_s": not cluster.token_step_s,
        "wake": cluster.wake is None,
        "whole_rows": not cluster.whole_rows,
        "techniques": cluster.techniques == NO_TECHNIQUES,
    }
    return kinds | {"more": more} | {name: True for name, is_so in unsaid.items() if is_so}


def _unsaid_of_kind(kind: DeviceKind) -> dict[str, Any]:
    """What is None, all of which came after the first plans had been hashed."""
    shares = asdict(kind.calibration)
    own = {field.name: True for field in fields(kind) if getattr(kind, field.name) is None}
    return own | {"calibration": {name: True for name, share in shares.items() if share is None}}


def _unsaid_of_program(program: Program, named: bool = True) -> dict[str, Any]:
    return {"graph": _unsaid(program.graph, named), "edges": _unsaid_of_edges(program.edges)}


def _unsaid(graph: Graph, named: bool = True) -> dict[str, Any]:
    """What the JSON of a graph leaves out. `named`: whether it says which named evaluations it has."""
    evaluations = {i: {"nodes": _unsaid_of_nodes(e.nodes)} for i, e in enumerate(graph.evaluations)}
    return {
        "models": {i: _unsaid_of_model(model) for i, model in enumerate(graph.models)},
        "nodes": _unsaid_of_nodes(graph.nodes),
        "evaluations": evaluations if named else True,
    }


def _unsaid_of_model(model: Model) -> dict[str, Any]:
    said = {"adapter": model.adapter, "base": model.base}
    unsaid: dict[str, Any] = {name: True for name, value in said.items() if value is None}
    return _unsaid_of_adapter(model.adapter) | unsaid


def _unsaid_of_adapter(adapter: AnyAdapter | None) -> dict[str, Any]:
    return {"adapter": {"dropout": True}} if adapter and not adapter.dropout else {}


def _unsaid_of_nodes(nodes: Sequence[Node]) -> dict[int, Any]:
    return {i: _unsaid_of_node(node) for i, node in enumerate(nodes)}


def _unsaid_of_node(node: Node) -> dict[str, Any]:
    plain = (name for name in ("base", "delta_weights") if node.model and not getattr(node.model, name))
    unsaid = dict.fromkeys(plain, True)
    model: dict[str, Any] = {"model": unsaid} if unsaid else {}
    return model if node.lengths else model | {"lengths": True}


def _plain(nodes: tuple[NodePlan, ...]) -> dict[int, Any]:
    return {number: _unsaid_of_plan(own) for number, own in enumerate(nodes)}


def _unsaid_of_plan(own: NodePlan) -> dict[str, Any]:
    cache: dict[str, Any] = {} if own.cache_tokens else {"cache_tokens": True}
    return {"strategy": _unsaid_of_strategy(own.strategy)} | cache


def _unsaid_of_strategy(strategy: Strategy) -> dict[str, Any]:
    plain = {
        "sp": not strategy.sp,
        "vpp": strategy.vpp == 1,
        "share_forward": not strategy.share_forward,
        "whole_experts": not strategy.whole_experts,
    }
    return {name: True for name, unsaid in plain.items() if unsaid}


def _unsaid_of_edges(edges: Sequence[Edge]) -> dict[int, Any]:
    """Weights that are all sent do not say so, either."""
    found: dict[int, Any] = {}
    for number, edge in enumerate(edges):
        ends = ("source_sharding", "target_sharding") if isinstance(edge, WeightEdge) else ()
        found[number] = {end: _unsaid_of_sharding(getattr(edge, end)) for end in ends}
        found[number] |= {"changed": True} if isinstance(edge, WeightEdge) and edge.changed is None else {}
    return found


def _unsaid_of_sharding(sharding: Sharding) -> dict[str, Any]:
    plain = {"vpp": sharding.vpp == 1, "whole_experts": not sharding.whole_experts}
    return {name: True for name, unsaid in plain.items() if unsaid}


def _unsaid_of_shape(shape: ModelShape) -> dict[str, Any]:
    """Fields with their default, but for those that were there when plans began to have hashes."""
    later = (field for field in fields(shape) if field.name in _LATER)
    unsaid: dict[str, Any] = {f.name: True for f in later if getattr(shape, f.name) == f.default}
    if shape.window and shape.window.rope_theta is None:
        unsaid["window"] = {"rope_theta": True}
    unsaid |= _unsaid_of_adapter(shape.adapter)
    if shape.moe:
        plain = {"biased": not shape.moe.biased, "clamp": shape.moe.clamp is None}
        unsaid["moe"] = {name: True for name, default in plain.items() if default}
    return unsaid


def _without_places(program: Program | None) -> Program | None:
    return replace(program, graph=_bare(program.graph)) if program else None


def _bare(value: Any, keeps_text: bool = False) -> Any:
    """The same without places in files and, unless it `keeps_text`, source text."""
    if isinstance(value, Span):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        kept: dict[str, Any] = {
            f.name: _bare(getattr(value, f.name), keeps_text) for f in fields(value) if f.init
        }
        if isinstance(value, Graph) and not keeps_text:
            kept["text"] = ""
        return type(value)(**kept)
    if isinstance(value, tuple):
        return tuple(_bare(inner, keeps_text) for inner in cast(tuple[Any, ...], value))
    if isinstance(value, Mapping):
        return {key: _bare(inner, keeps_text) for key, inner in cast(Mapping[str, Any], value).items()}
    return value


def without_places(plan: Plan) -> Plan:
    """The plan, without the paths and lines of the files that its graph was read from."""
    return cast(Plan, _bare(plan, keeps_text=True))


def graph_hash(graph: Graph) -> str:
    """As `Plan.hash`, of the graph alone."""
    from pydantic import TypeAdapter

    without = _unsaid(graph, named=bool(graph.evaluations))
    return hashlib.sha256(TypeAdapter(Graph).dump_json(_bare(graph), exclude=without)).hexdigest()[:12]
