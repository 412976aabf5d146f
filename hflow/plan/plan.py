"""The Plan: who computes what, where, in which layout, and what moves. Frozen; round-trips as JSON.

A plan belongs to one Graph on one Cluster. The runtime executes exactly what it says and looks at
nothing else: neither the passes nor the search that found it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

from hflow.bounded_read import UnreadableError, parse_json, read_json, read_text
from hflow.diagnostics import Diagnostic, HflowError, Span
from hflow.graph.ir import Graph
from hflow.graph.types import ValueType
from hflow.plan.cluster import Cluster
from hflow.plan.digests import Digests
from hflow.plan.layout import Box, Layout, Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import PLAIN, Strategy
from hflow.whole_file import write_whole

VERSION = 6  # of the file
HASHED_VERSION = 5  # of the decisions in it, over which the hash is
MAX_PLAN_BYTES = 2**26
Collective = Literal["alias", "all_gather", "broadcast", "scatter", "gather", "all_to_all", "p2p"]
Engine = Literal["megatron", "sglang", "python"]


@dataclass(frozen=True)
class NodePlan:
    """One node on its mesh.

    `micro_batch`: rows that one data-parallel rank passes through the model at once. `start_s`: seconds
    from the start of the step; `time_s`: of all its executions in a step; `memory_bytes`: the node's own
    peak on one device. `offload`: while the node does not run, what it alone needs is in the host's memory:
    the optimizer's state of a train node, the weights of a frozen model.
    """

    node: str
    kind: str
    model: str | None
    engine: Engine
    mesh: Mesh
    micro_batch: int
    start_s: float
    time_s: float
    memory_bytes: int
    strategy: Strategy = PLAIN
    offload: bool = False

    @property
    def sharding(self) -> Sharding:
        """How the weights that the node uses are split."""
        return Sharding.of(self.mesh, self.strategy)


@dataclass(frozen=True)
class Copy:
    """`box` of a tensor (global indices) goes from device `source` to device `target`.

    `phase` orders relays: a copy of phase 1 sends what its source received in phase 0.
    """

    source: int
    target: int
    box: Box
    phase: int = 0


@dataclass(frozen=True)
class CopySet:
    """The same copies for several tensors of one shape (e.g. one weight of every layer)."""

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    collective: Collective
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class EdgePlan:
    """A lowered edge: the layouts at both ends and the copies between them.

    Data edges copy rows: their boxes have one range, of rows. Weight edges copy boxes of HF
    parameters, between two shardings. `bytes_per_device` is what the busiest device receives; for ragged
    values it is an estimate from the greatest lengths.
    """

    name: str
    kind: Literal["data", "weights"]
    source: str
    target: str
    ports: tuple[str, ...]
    types: tuple[ValueType, ...]
    source_mesh: Mesh
    target_mesh: Mesh
    source_layout: Layout | None
    target_layout: Layout | None
    collective: Collective
    copies: tuple[CopySet, ...]
    size_bytes: int
    bytes_per_device: int
    lower_bound_bytes_per_device: int
    peak_bytes: int
    time_s: float
    source_sharding: Sharding | None = None
    target_sharding: Sharding | None = None


@dataclass(frozen=True)
class Instruction:
    """One thing the workers on `devices` do.

    - ``call``: run node `target`; `inputs` and `outputs` map ports to handles in the worker's store; with an
      ``await`` in the same program, only begin to;
    - ``await``: wait until node `target`, which was called, has ended (`outputs`);
    - ``transfer``: execute data edge number `edge`; handles of its ports;
    - ``weights``: execute weight edge number `edge`, into the weights that node `target` reads; with
      `every`, only in steps that are multiples of it, and not in the first; if the trainer `lends` its
      memory, its own weights give it back, for they are a part of what is read;
    - ``recall``: put scalars of node `target` of `lag` steps ago into the store (`outputs`), `init` where
      there are none;
    - ``carry``: keep scalars of node `target` (`inputs`), for recalls up to `lag` steps from now;
    - ``loop``: run the rounds of region `target`, each of which is `body` and ends with the call of the
      region's own node; then put what was collected into the store (`outputs`);
    - ``onload``: bring what node `target` keeps in the host's memory (`NodePlan.offload`) to the devices;
    - ``offload``: the reverse;
    - ``release``: drop the weights that node `target` reads, of which it has a copy of its own; if the
      trainer `lends` its memory, its weights come back from them before;
    - ``free``: drop handles (`inputs`).

    `after`: positions, in the same list of instructions, of those that must have ended before: they write
    what this one reads, or read what it overwrites. `time_s`: predicted seconds (0 for what only keeps or
    drops; of a loop, all its rounds).
    """

    op: Literal[
        "call",
        "await",
        "transfer",
        "weights",
        "recall",
        "carry",
        "loop",
        "onload",
        "offload",
        "release",
        "free",
    ]
    target: str
    devices: tuple[int, ...]
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])
    edge: int | None = None
    after: tuple[int, ...] = ()
    lag: int = 0
    init: float = 0.0
    every: int = 0
    body: tuple[Instruction, ...] = ()
    time_s: float = 0.0
    lends: bool = False


@dataclass(frozen=True)
class Program:
    """What every worker walks through: edges, and instructions in an order all workers share."""

    graph: Graph
    edges: tuple[EdgePlan, ...]
    instructions: tuple[Instruction, ...]

    def lending_edge(self, reader: str) -> EdgePlan:
        """The edge over which weights come to node `reader` from a trainer that lends their memory.

        Raises:
            StopIteration: none does.
        """
        moves = (i.edge for i in self.instructions if i.op == "weights" and i.target == reader and i.lends)
        return next(self.edges[number] for number in moves if number is not None)


@dataclass(frozen=True)
class DeviceMemory:
    """The predicted peak on a set of devices, by what holds it, and the node that runs then."""

    devices: tuple[int, ...]
    peak_bytes: int
    capacity_bytes: int
    parts: Mapping[str, int]
    node: str = ""


@dataclass(frozen=True)
class Search:
    """How the plan was found. `explored`: complete plans that were priced. `bound_s`: no plan has a shorter
    step; `gap`: by what part of the step's time the plan may be worse than the best one; None when that is
    not proven, because the planner proves nothing, or because plans that were not searched may be shorter:
    those with nodes `unsearched` on other devices, as `try_pin` puts one. `searched_gap`: the same as `gap`,
    of the plans that were searched."""

    explored: int
    gap: float | None
    bound_s: float = 0.0
    planner: str = "exact"
    unsearched: tuple[str, ...] = ()
    try_pin: str = ""
    searched_gap: float | None = None


@dataclass(frozen=True)
class Plan:
    """`step` runs every step; `evaluation` runs the held-out rows through the same nodes' plans. `digests`:
    of the files of models and functions that the graph was compiled with."""

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

    @property
    def graph(self) -> Graph:
        return self.step.graph

    @cached_property
    def _nodes(self) -> dict[str, NodePlan]:
        return {n.node: n for n in self.nodes}

    def node(self, name: str) -> NodePlan:
        return self._nodes[name]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({d for n in self.nodes for d in n.mesh.devices}))

    @cached_property
    def hash(self) -> str:
        """The first 12 hex digits of SHA-256 over what was decided: without places in files, source text and
        digests of files, and however it was found."""
        step, evaluation = map(_without_places, (self.step, self.evaluation))
        bare = replace(self, version=HASHED_VERSION, step=step, evaluation=evaluation, search=Search(0, None))
        found_by = {"unsearched", "try_pin", "searched_gap"}
        text = to_json(bare, {"digests": True, "search": found_by, "cluster": _unsaid(self.cluster)})
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def save(self, path: Path) -> None:
        """Write the plan as JSON, whole or not at all. Raises HflowError HF306 when that is not possible."""
        write_whole(path, to_json(self) + "\n", "HF306")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from hflow.view.pages.notebook import plan_bundle

        return plan_bundle(self)


def to_json(plan: Plan, leave_out: Mapping[str, Any] | None = None) -> str:
    """`leave_out`: fields, and fields of fields, as pydantic's `exclude`."""
    from pydantic import TypeAdapter

    return TypeAdapter(Plan).dump_json(plan, exclude=dict(leave_out) if leave_out else None).decode()


def _unsaid(cluster: Cluster) -> dict[str, Any]:
    """What few cluster files say and this one does not: with it, the hash of every plan would be another."""
    fields_ = {"host_memory_bytes": None, "server_bytes": 0}
    found: dict[str, Any] = {
        name: True for name, unsaid in fields_.items() if getattr(cluster, name) == unsaid
    }
    if not cluster.device.overhead_bytes:
        found["device"] = {"overhead_bytes"}
    return found


def load_plan(path: Path) -> Plan:
    """Read a plan written by `Plan.save`.

    Raises:
        HflowError: HF001 when the file cannot be read, HF306 when it is no plan, contradicts itself, or is of
            another version.
    """
    from pydantic import TypeAdapter, ValidationError

    from hflow.plan.verify.consistency import inconsistencies
    from hflow.plan.verify.graph_consistency import broken_graph
    from hflow.plan.verify.placement_consistency import misplaced
    from hflow.plan.verify.plan_numbers import bad_numbers

    try:
        text = read_text(path, MAX_PLAN_BYTES)
        found = parse_json(text, allow_nan=False)
    except UnreadableError as error:
        if error.reason != "json":
            raise HflowError(Diagnostic("HF001", f"cannot read `{path}`: {error}")) from None
        raise HflowError(_no_plan(path, f": {error}")) from None
    if not isinstance(found, dict):
        raise HflowError(_no_plan(path))
    version = cast("dict[str, Any]", found).get("version")
    if version != VERSION:
        message = f"`{path}` has plan version {version}; this hflow reads version {VERSION}"
        raise HflowError(Diagnostic("HF306", message, help="compile the graph again"))
    try:
        plan = TypeAdapter(Plan).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = f"`{path}`: {where}: {first['msg']}"
        raise HflowError(Diagnostic("HF306", message, help="compile the graph again")) from None
    programs = [program for program in (plan.step, plan.evaluation) if program]
    graphs = (problem for program in programs for problem in broken_graph(program.graph))
    problem = next(chain(bad_numbers(plan), graphs, misplaced(plan), inconsistencies(plan)), None)
    if problem:
        message = f"`{path}` contradicts itself: {problem}"
        raise HflowError(Diagnostic("HF306", message, help="compile the graph again"))
    return plan


def _no_plan(path: Path, why: str = "") -> Diagnostic:
    help_ = "`hflow compile GRAPH -o plan.json` writes one"
    return Diagnostic("HF306", f"`{path}` is no plan{why}", help=help_)


def is_plan(path: Path) -> bool:
    """Whether a file holds a plan, of whatever version."""
    try:
        found = read_json(path, MAX_PLAN_BYTES)
    except UnreadableError:
        return False
    return isinstance(found, dict) and {"version", "cluster", "step"} <= found.keys()


def _without_places(program: Program | None) -> Program | None:
    return replace(program, graph=_bare(program.graph)) if program else None


def _bare(value: Any) -> Any:
    """The same without places in files and source text."""
    if isinstance(value, Span):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        kept = {f.name: _bare(getattr(value, f.name)) for f in fields(value) if f.init}
        return type(value)(**(kept | ({"text": ""} if isinstance(value, Graph) else {})))
    if isinstance(value, tuple):
        return tuple(map(_bare, cast(tuple[Any, ...], value)))
    if isinstance(value, Mapping):
        return {key: _bare(inner) for key, inner in cast(Mapping[str, Any], value).items()}
    return value
