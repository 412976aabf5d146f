"""What the passes hand on: a plan in the making. Frozen; each pass fills in its part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hflow.compiler.candidates.node_groups import Candidates
from hflow.compiler.options import DEFAULTS, PlannerOptions
from hflow.compiler.pins import Pin
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.engine_registry import GenerationEngine
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import DeviceMemory, EvaluationPlan, Search
from hflow.plan.program import Program


@dataclass(frozen=True)
class WeightRead:
    """`reader` (generate or score) reads the weights that `trainer` trains.

    `lag`: how many updates old they are. `every`: the reader's model is another one, which takes over the
    weights before every so many steps; 0 for the trained model itself.
    """

    model: str
    trainer: str
    reader: str
    lag: int = 0
    every: int = 0


@dataclass(frozen=True)
class Draft:
    """`engines`: of the generate nodes. `candidates`: the candidates of every node group, by its name.
    `sharing`: score nodes that share their forward pass, with the train node that each shares it with.
    `below_s`: only plans with a shorter step are of use; there may be none.
    `step`: without instructions until they are written. `evaluations`: the named ones, as soon as all nodes
    of the step have plans."""

    graph: Graph
    evaluation_graph: Graph | None
    cluster: Cluster
    shapes: Mapping[str, ModelShape]
    step: Program
    pins: tuple[Pin, ...] = ()
    options: PlannerOptions = DEFAULTS
    engines: Mapping[str, GenerationEngine] = field(default_factory=dict[str, GenerationEngine])
    sharing: Mapping[str, str] = field(default_factory=dict[str, str])
    below_s: float = float("inf")
    weight_edges: tuple[WeightRead, ...] = ()
    candidates: Mapping[str, Candidates] = field(default_factory=dict[str, Candidates])
    nodes: tuple[NodePlan, ...] = ()
    evaluation: Program | None = None
    evaluations: tuple[EvaluationPlan, ...] = ()
    memory: tuple[DeviceMemory, ...] = ()
    step_time_s: float = 0.0
    search: Search = field(default_factory=lambda: Search(0, 0.0))

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """Of the step, of the evaluation if there is one, and of the named evaluations that are planned."""
        own = (self.graph, self.evaluation_graph) if self.evaluation_graph else (self.graph,)
        return (*own, *(named.program.graph for named in self.evaluations))

    @property
    def programs(self) -> tuple[Program, ...]:
        """Those of `graphs`."""
        own = (self.step, self.evaluation) if self.evaluation else (self.step,)
        return (*own, *(named.program for named in self.evaluations))

    def node_plan(self, name: str) -> NodePlan:
        return next(n for n in self.nodes if n.node == name)


class NoneShorter(HflowError):  # noqa: N818  (it is what a search has found)
    """No plan was found of those of use (`Draft.below_s`); no step of them takes less than `bound_s`."""

    def __init__(self, graph: str, bound_s: float, explored: int):
        super().__init__(Diagnostic("HF305", f"no plan of `{graph}` is shorter so"))
        self.bound_s, self.explored = bound_s, explored
