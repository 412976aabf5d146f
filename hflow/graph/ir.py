"""The typed dataflow graph of one RLHF algorithm. Frozen; knows no devices.

A `Graph` comes from `hflow.graph.load` (YAML); everything after it (compiler, runtime, views) only
reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import networkx as nx

from hflow.diagnostics import Span
from hflow.display import Displayed
from hflow.graph.adapter import AnyAdapter
from hflow.graph.lengths import Lengths
from hflow.graph.types import ValueType

OpKind = Literal["data", "generate", "score", "train", "call", "repeat"]
MetricKind = Literal["mean", "pass", "majority", "length", "finished"]
EvaluationTime = Literal["start", "end"]
Head = Literal["lm", "scalar"]
WeightDType = Literal["f32", "bf16"]
ModelDType = Literal["auto", "f32", "bf16"]


@dataclass(frozen=True)
class Refresh:
    """A frozen model takes over the weights of the trained `model` before every `every`-th step; with a
    `decay`, their moving average: decay * average + (1 - decay) * weights, which begins as the frozen model
    and moves just then."""

    model: str
    every: int
    decay: float = 0.0

    @property
    def is_average(self) -> bool:
        return self.decay > 0


@dataclass(frozen=True)
class Model:
    """One set of weights. `path` is a local HF folder, relative to where hflow runs.

    `head`: ``lm`` predicts tokens; ``scalar`` gives each position one number (critics, reward and cost
    models). `dtype`: of the weights; ``auto``: the cluster decides that the graph is compiled for.
    `adapter`: what of it is trained, or, of a frozen model, added to its weights; None: there is
    none, and all weights are trained. `base`: the trained model whose frozen weights are this one's too, on
    the same memory; None: it has its own.
    """

    name: str
    path: str
    head: Head = "lm"
    frozen: bool = False
    dtype: ModelDType = "auto"
    refresh: Refresh | None = None
    adapter: AnyAdapter | None = None
    base: str | None = None
    span: Span | None = field(default=None, compare=False)

    @property
    def weight_dtype(self) -> WeightDType:
        """`dtype` of a model in a plan, which has one."""
        assert self.dtype != "auto", f"no cluster has decided the dtype of `{self.name}`"
        return self.dtype

    @property
    def base_owner(self) -> str:
        """The model on whose memory its frozen weights are where it is trained, or is frozen itself: another
        one, or itself."""
        return self.base or self.name


@dataclass(frozen=True)
class ModelUse:
    """A node's model and how many updates old its weights may be (0: on-policy). `base`: without the model's
    adapter, which leaves the weights that the model began with. `delta_weights`: from other hosts come only
    the weights that have changed since they were sent last, about this share of all; None: all come."""

    model: str
    lag: int = 0
    base: bool = False
    delta_weights: float | None = None

    @property
    def weights(self) -> str:
        """What people call the weights that are used."""
        return f"{self.model}'s base" if self.base else self.model


@dataclass(frozen=True)
class Ref:
    """`node.port`: a value, named by its producer."""

    node: str
    port: str

    def __str__(self) -> str:
        return f"{self.node}.{self.port}"


@dataclass(frozen=True)
class Input:
    """An edge, seen from its consumer. `derived`: not written in the file, wired by type.

    With a `lag` the value is that of so many steps ago, and `init` in the steps that have none before
    them: a loop-carried scalar.
    """

    port: str
    source: Ref
    type: ValueType
    lag: int = 0
    init: float = 0.0
    derived: bool = False
    span: Span | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Output:
    port: str
    type: ValueType


@dataclass(frozen=True)
class Function:
    """A typed Python function named by a graph file, as read from its source (never imported here).

    `reference` is ``package.module.function`` or ``./file.py:function``. `options` maps each
    keyword-only parameter to its default. `trained` lists the inputs that a train node computes
    itself with the model it trains (log-probs, entropy, values); the rest come over edges. A
    `whole_batch` function sees all rows at once, on every device of its node; `min_group` is the least
    number of samples per prompt with which it says anything; an option of `needs` asks, where it is not
    0, for the optional input that it maps to.
    """

    reference: str
    signature: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trained: tuple[str, ...] = ()
    whole_batch: bool = False
    min_group: int = 1
    needs: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Repeat:
    """How a train node walks its rows: `epochs` passes in optimizer steps of `minibatch` rows."""

    epochs: int = 1
    minibatch: int = 0


@dataclass(frozen=True)
class Node:
    """One call in the step. `options` holds the checked `with:` values, defaults filled in.

    `after` names nodes that come first although no value says so. `region` is the loop that the node
    stands in: the step loop, or a ``repeat`` node. A ``repeat`` node comes after the nodes of its region
    and reads what leaves it: its input `keep`, then one input for each of its outputs. `lengths`: of the
    prompts of a data node, or of the responses of a generate node, as the planner is to expect them; no token
    depends on it. None: all count at the greatest.
    """

    name: str
    op: OpKind
    model: ModelUse | None = None
    function: Function | None = None
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    repeat: Repeat | None = None
    after: tuple[str, ...] = ()
    region: str = "step"
    span: Span | None = field(default=None, compare=False)
    lengths: Lengths | None = None

    def input(self, port: str) -> Input | None:
        return next((i for i in self.inputs if i.port == port), None)

    def output(self, port: str) -> Output | None:
        return next((o for o in self.outputs if o.port == port), None)

    def type_of(self, port: str) -> ValueType:
        """Of the value that it makes at `port`, or else reads there. Raises StopIteration without one."""
        return next(p.type for p in (*self.outputs, *self.inputs) if p.port == port)

    @property
    def model_use(self) -> ModelUse:
        """`model`, of a node that has one: all that generate, score or train."""
        assert self.model, f"`{self.name}` ({self.op}) has no model"
        return self.model

    @property
    def rows(self) -> int:
        """Rows that the node works on: those of its first output, or of its first input."""
        return (self.outputs[0].type if self.outputs else self.inputs[0].type).rows

    @property
    def updates(self) -> int:
        """Optimizer steps of a train node in one step of the loop; 0 of other nodes."""
        return self.repeat.epochs * self.minibatches if self.repeat else 0

    @property
    def minibatches(self) -> int:
        """Optimizer steps of a train node in one epoch; 0 of other nodes."""
        return self.rows // (self.repeat.minibatch or self.rows) if self.repeat else 0

    @property
    def in_flight(self) -> bool:
        """Whether its weights are renewed while it samples."""
        return bool(self.options.get("in_flight") and self.model and self.model.lag)


@dataclass(frozen=True)
class Region:
    """Nodes that run again and again: the step loop, or the rounds of a ``repeat`` node.

    Rounds go on until `rows` rows for which the value `until` is true have been collected, `times` at
    most; a surplus serves the next steps while its samples are no more than `max_age` updates old. The step
    loop just runs `times` times.
    """

    name: str
    times: int
    until: Ref | None = None
    rows: int = 0
    parent: str | None = None
    max_age: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Held-out evaluation, made of the algorithm's own nodes.

    The nodes that `metric` (an ``f32[rows]`` value) depends on run on `rows` held-out rows, with one
    greedy sample per prompt, before the first step, after the last, and `every` so many steps (0: never
    between).
    """

    metric: Ref
    rows: int
    every: int = 0

    def is_due(self, done: int, steps: int) -> bool:
        """Whether it runs when `done` of `steps` steps have been."""
        return done in (0, steps) or bool(self.every and done % self.every == 0)


@dataclass(frozen=True)
class EvaluationMetric:
    """One number of a named evaluation, a mean over its rows.

    `source` is ``node.port`` for `mean`, `pass` and `majority`, and a generate node for `length` and
    `finished`. `options` has those of the kind, defaults filled in: `k` and `threshold`, and of `majority`
    also `correct` (``node.port``) and `by` (a function, or None).
    """

    name: str
    kind: MetricKind
    source: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def column(self, evaluation: str) -> str:
        """What workers report it as: a metric of one of the evaluation's nodes."""
        node, _, port = self.source.partition(".")
        match self.kind:
            case "mean":
                return f"{evaluated_node(node, evaluation)}.{port}"
            case "length":
                return f"{evaluated_node(node, evaluation)}.response_length"
            case "finished":
                return f"{evaluated_node(node, evaluation)}.finished"
            case "pass" | "majority":
                return f"{metric_key(evaluation, self.name)}.rate"


@dataclass(frozen=True)
class NamedEvaluation:
    """One of several evaluations, each with rows, sampling and metrics of its own.

    `nodes`: those of the step that the metrics depend on, typed with this evaluation's options and called
    ``node@evaluation``, and a call node for each metric that a function computes; in topological order.
    `data` and `sampling`: options that differ from those of the step's data and generate nodes. Without
    `data` the `rows` are held out of the step's own. It runs every so many steps (0: never between), and `at`
    the start and the end.
    """

    name: str
    rows: int
    metrics: tuple[EvaluationMetric, ...]
    nodes: tuple[Node, ...]
    every: int = 0
    at: tuple[EvaluationTime, ...] = ("start", "end")
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its metrics for people and for `best`: ``eval/test/pass@1``."""
        return tuple(metric_key(self.name, metric.name) for metric in self.metrics)

    def is_due(self, done: int, steps: int) -> bool:
        """Whether it runs when `done` of `steps` steps have been."""
        named = (done == 0 and "start" in self.at) or (done == steps and "end" in self.at)
        return named or bool(self.every and done > 0 and done % self.every == 0)


def metric_key(evaluation: str, metric: str) -> str:
    """``eval/test/pass@1``."""
    return f"eval/{evaluation}/{metric}"


def evaluated_node(node: str, evaluation: str) -> str:
    """What a node of the step is called in a named evaluation: ``rollout@test``."""
    return f"{node}@{evaluation}"


def step_node(name: str) -> str:
    """The node of the step that `name` is, or stands for in a named evaluation; of a metric's own node the
    name itself, which is none of the step's."""
    return name if "/" in name else name.partition("@")[0]


def evaluation_of(name: str) -> str:
    """The named evaluation that a node stands in for one of the step; empty for one of the step."""
    return "" if "/" in name else name.partition("@")[2]


@dataclass(frozen=True)
class Graph(Displayed):
    name: str
    doc: str
    params: Mapping[str, Any]
    models: tuple[Model, ...]
    nodes: tuple[Node, ...]  # in topological order of one step
    regions: tuple[Region, ...]  # the first is the step loop
    evaluation: Evaluation | None = None
    seed: int = 0
    text: str = field(default="", compare=False)  # of a graph file that says the same, for people
    evaluations: tuple[NamedEvaluation, ...] = ()

    @property
    def steps(self) -> int:
        return self.regions[0].times

    def region(self, name: str) -> Region:
        return next(r for r in self.regions if r.name == name)

    def inside(self, region: str) -> tuple[Node, ...]:
        """The nodes that stand in a region."""
        return tuple(n for n in self.nodes if n.region == region)

    @cached_property
    def reward(self) -> str:
        """The value whose mean is the reward of what is trained on: what evaluation measures, unless that is
        of texts that no train node sees; else the only `score` of a function or of a frozen model that leads
        to training (where none does: that some node reads), or that of a node `reward`; empty when there is
        none."""
        leading = {name for n in self.nodes if n.op == "train" for name in self._behind(n.name)}
        metric = self.evaluation.metric if self.evaluation else None
        if metric and self._samples(metric.node) <= leading:
            return str(metric)
        apart = self._samples(metric.node) - leading if metric else set[str]()
        read = {i.source for _, i in self.edges()}
        judges = [n for n in self.nodes if n.op == "call" or (n.model and self.model_of(n).frozen)]
        scores = [n.name for n in judges if Ref(n.name, "score") in read and n.op in ("call", "score")]
        scores = [n for n in scores if n in leading] or [n for n in scores if not apart & self._samples(n)]
        if len(scores) == 1 or "reward" in scores:
            return f"{scores[0] if len(scores) == 1 else 'reward'}.score"
        return ""

    def _samples(self, name: str) -> set[str]:
        """The generate nodes whose texts a node depends on."""
        behind = self._behind(name)
        return {n.name for n in self.nodes if n.op == "generate" and n.name in behind}

    def _behind(self, name: str) -> set[str]:
        """A node and all that it depends on within a step."""
        return {name, *self.ancestors[name]}

    @cached_property
    def ancestors(self) -> Mapping[str, frozenset[str]]:
        """Of every node those that come before it in a step, in whatever order they run."""
        dag, found = self.dag(), dict[str, frozenset[str]]()
        for name in nx.topological_sort(dag):
            direct = frozenset(dag.predecessors(name))
            found[name] = direct.union(*(found[before] for before in direct))
        return found

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def _models(self) -> dict[str, Model]:
        return {m.name: m for m in self.models}

    def node(self, name: str) -> Node:
        return self._nodes[name]

    def model(self, name: str) -> Model:
        return self._models[name]

    def model_of(self, node: Node) -> Model:
        """The model that a node generates, scores or trains with."""
        return self._models[node.model_use.model]

    def edges(self) -> Iterator[tuple[Node, Input]]:
        """Every data edge as (consumer, input), in node order."""
        for node in self.nodes:
            for value in node.inputs:
                yield node, value

    def trainers(self, model: str) -> tuple[Node, ...]:
        """The nodes that train a model, in their order within a step."""
        return tuple(n for n in self.nodes if n.op == "train" and n.model and n.model.model == model)

    def holders(self, model: str) -> tuple[Node, ...]:
        """The nodes that decide where a model lies: those that train it; of a frozen one all that use it."""
        users = (n for n in self.nodes if n.model and n.model.model == model)
        return self.trainers(model) or tuple(users)

    def dag(self) -> nx.DiGraph[str]:
        """Node names with an edge for every data edge, and every `after`, within one step; a region waits
        with all of its nodes."""
        dag: nx.DiGraph[str] = nx.DiGraph()
        dag.add_nodes_from(n.name for n in self.nodes)
        dag.add_edges_from((i.source.node, n.name) for n, i in self.edges() if i.lag == 0)
        for node in (n for n in self.nodes if n.after):
            waiting = [node, *self.inside(node.name)]
            dag.add_edges_from((first, n.name) for first in node.after for n in waiting)
        return dag
