"""The shape of a graph file: keys, kinds and bounds of everything but the meaning.

These pydantic models stand at the file boundary only; the graph is made of frozen dataclasses.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hflow.graph.adapter import ADAPTER_TARGETS, AdapterTarget
from hflow.graph.ir import ModelDType
from hflow.graph.source.run_schema import CheckpointSpec, HangSpec, ReplanSpec, RunSpec, SamplesSpec
from hflow.graph.source.schema_values import (
    KnownKeys,
    MetricName,
    Name,
    Natural,
    PathText,
    Positive,
    RefText,
    Tokens,
    texts,
)


def _plain_scalar(value: Any) -> Any:
    finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, (bool, int, float, str)) or not finite:
        raise PydanticCustomError("plain_scalar", "expected a number, a string, true or false")
    return value


def _use(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


def _source(value: Any) -> Any:
    return {"from": value} if isinstance(value, str) else value


def _metric(value: Any) -> Any:
    return {"mean": value} if isinstance(value, str) else value


def _adapter(value: Any) -> Any:
    return {"rank": value} if isinstance(value, int) and not isinstance(value, bool) else value


class RefreshSpec(KnownKeys):
    """A frozen model takes over the weights of a trained one before every `every`-th step; with `decay`,
    their moving average."""

    from_: str = Field(alias="from")
    every: Positive
    decay: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0


class AdapterSpec(KnownKeys):
    """Low-rank matrices beside a model's own, which stay as they are (LoRA); a number is short for `rank`.
    `path`: a folder of PEFT's with matrices, rank, alpha and targets; what is said again must be equal."""

    rank: Positive | None = None
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0
    targets: Annotated[list[AdapterTarget], BeforeValidator(texts), Field(min_length=1)] = list(
        ADAPTER_TARGETS
    )
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    path: PathText | None = None


class ModelSpec(KnownKeys):
    """One set of weights; `head: scalar` for critics, reward and cost models. `base`: the trained model whose
    frozen weights a model with an adapter shares."""

    path: PathText
    head: Literal["lm", "scalar"] = "lm"
    frozen: bool = False
    dtype: ModelDType = "auto"
    refresh: RefreshSpec | None = None
    adapter: Annotated[AdapterSpec | None, BeforeValidator(_adapter)] = None
    base: str | None = None


class UseSpec(KnownKeys):
    """`lag`: how many updates old the weights may be. `base`: without the model's adapter. `delta_weights`:
    from other hosts come only the weights that have changed, about this share of all."""

    use: str
    lag: Natural = 0
    base: bool = False
    delta_weights: Annotated[float, Field(gt=0, le=1)] | None = None


class LoopSpec(KnownKeys):
    name: Name
    times: Positive


class EvalSpec(KnownKeys):
    metric: RefText
    rows: Positive
    every: Natural = 0


class MetricSpec(KnownKeys):
    """One number of an evaluation: one of the kinds `mean`, `pass`, `majority`, `length` and `finished` with
    what it measures, and the options of that kind. `node.port` is short for the mean of it."""

    mean: RefText | None = None
    pass_: RefText | None = Field(None, alias="pass")
    majority: RefText | None = None
    length: Name | None = None
    finished: Name | None = None
    k: Positive | None = None
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None
    correct: RefText | None = None
    by: str | None = None


class NamedEvaluationSpec(KnownKeys):
    """An evaluation with rows, sampling and metrics of its own; `data` and `sampling` are options that differ
    from those of the data node and of the generate nodes."""

    rows: Positive
    data: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    metrics: dict[MetricName, Annotated[MetricSpec, BeforeValidator(_metric)]] = Field(min_length=1)
    every: Natural = 0
    at: list[Literal["start", "end"]] = ["start", "end"]


class RepeatSpec(KnownKeys):
    epochs: Positive = 1
    minibatch: Positive | None = None


class SourceSpec(KnownKeys):
    """`from`: the value that is read; with `lag` that of so many steps ago, `init` before there is one."""

    from_: RefText = Field(alias="from")
    lag: Natural = 0
    init: float | None = None


class UntilSpec(KnownKeys):
    """Rounds go on until `rows` rows for which `keep` is true have been collected. A surplus serves the next
    steps while its samples are no more than `max_age` updates old."""

    rows: Positive
    keep: RefText
    max_age: Natural = 0


ModelUseSpec = Annotated[UseSpec, BeforeValidator(_use)]
InputSpec = Annotated[SourceSpec, BeforeValidator(_source)]
NamesSpec = Annotated[list[Name], BeforeValidator(texts)]


class LengthsSpec(KnownKeys):
    """Of the prompts of a data node, or of the responses of a generate node, in tokens, as the planner is to
    expect them. `p50`: half of them are no longer. `from`: a run folder, whose lengths these are."""

    mean: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    p0: Tokens | None = None
    p5: Tokens | None = None
    p10: Tokens | None = None
    p25: Tokens | None = None
    p50: Tokens | None = None
    p75: Tokens | None = None
    p90: Tokens | None = None
    p95: Tokens | None = None
    p99: Tokens | None = None
    p100: Tokens | None = None
    from_: str | None = Field(None, alias="from")


class _NodeSpec(KnownKeys):
    with_: dict[str, Any] = Field({}, alias="with")
    after: NamesSpec = []


class _ReadingSpec(_NodeSpec):
    in_: dict[str, InputSpec] = Field({}, alias="in")


class DataSpec(_NodeSpec):
    op: Literal["data"]
    lengths: LengthsSpec | None = None
    out: dict[Name, str] = Field(min_length=1)


class GenerateSpec(_ReadingSpec):
    op: Literal["generate"]
    lengths: LengthsSpec | None = None
    model: ModelUseSpec
    out: dict[str, str] = {}


class ScoreSpec(_ReadingSpec):
    op: Literal["score"]
    model: ModelUseSpec
    out: dict[str, str] = {}


class TrainSpec(_ReadingSpec):
    op: Literal["train"]
    model: str
    loss: str
    repeat: RepeatSpec = RepeatSpec()  # type: ignore[call-arg]


class CallSpec(_ReadingSpec):
    op: Literal["call"]
    fn: str
    out: dict[str, str] = {}


InnerNodeSpec = Annotated[
    DataSpec | GenerateSpec | ScoreSpec | TrainSpec | CallSpec, Field(discriminator="op")
]


class RepeatNodeSpec(KnownKeys):
    """A region: its nodes run in rounds, at most `times`, and hand out the rows that were kept."""

    op: Literal["repeat"]
    nodes: dict[Name, InnerNodeSpec] = Field(min_length=1)
    until: UntilSpec
    times: Positive
    short: Literal["fail", "fill"] = "fail"
    out: dict[Name, RefText] = Field(min_length=1)
    after: NamesSpec = []


NodeSpec = Annotated[
    DataSpec | GenerateSpec | ScoreSpec | TrainSpec | CallSpec | RepeatNodeSpec, Field(discriminator="op")
]


class GraphSpec(KnownKeys):
    hflow: Literal[1]
    extends: str | None = Field(  # resolved before the schema is applied
        None, description="the parent: a graph file, relative to this one, or the name of an algorithm"
    )
    name: Name
    doc: str = ""
    params: dict[Name, Annotated[Any, AfterValidator(_plain_scalar)]] = {}
    seed: Natural = 0
    models: dict[Name, ModelSpec] = {}
    loop: LoopSpec
    eval: EvalSpec | None = None
    evaluations: dict[Name, NamedEvaluationSpec] = {}
    run: RunSpec | None = None
    nodes: dict[Name, NodeSpec] = Field(min_length=1)


OPS: dict[str, type[BaseModel]] = {
    "data": DataSpec,
    "generate": GenerateSpec,
    "score": ScoreSpec,
    "train": TrainSpec,
    "call": CallSpec,
    "repeat": RepeatNodeSpec,
}
# Mappings whose keys are the user's own names.
NAMED_SECTIONS = (("params",), ("models",), ("evaluations",), ("nodes",))


def keys_at(path: tuple[str | int, ...], op: str | None = None) -> tuple[str, ...] | None:
    """The keys that the schema knows in the mapping at `path`; None where any key may stand.

    `op` is the kind of the node that `path` leads into.
    """
    match path:
        case ():
            return _keys(GraphSpec)
        case ("loop",):
            return _keys(LoopSpec)
        case ("eval",):
            return _keys(EvalSpec)
        case ("evaluations", _):
            return _keys(NamedEvaluationSpec)
        case ("evaluations", _, "metrics", _):
            return _keys(MetricSpec)
        case ("run",):
            return _keys(RunSpec)
        case ("run", "checkpoint"):
            return _keys(CheckpointSpec)
        case ("run", "hang"):
            return _keys(HangSpec)
        case ("run", "samples"):
            return _keys(SamplesSpec)
        case ("run", "replan"):
            return _keys(ReplanSpec)
        case ("models", _):
            return _keys(ModelSpec)
        case ("models", _, "refresh"):
            return _keys(RefreshSpec)
        case ("models", _, "adapter"):
            return _keys(AdapterSpec)
        case ("nodes", _, "nodes", _, *inner):
            return keys_at(("nodes", "inner", *inner), op)
        case ("nodes", _):
            return _keys(OPS[op]) if op in OPS else ("op",)
        case ("nodes", _, "repeat"):
            return _keys(RepeatSpec)
        case ("nodes", _, "lengths"):
            return _keys(LengthsSpec)
        case ("nodes", _, "until"):
            return _keys(UntilSpec)
        case ("nodes", _, "model"):
            return _keys(UseSpec)
        case ("nodes", _, "in", _):
            return _keys(SourceSpec)
        case _:
            return None


def _keys(shape: type[BaseModel]) -> tuple[str, ...]:
    return tuple(f.alias or name for name, f in shape.model_fields.items())


def node_path(path: tuple[str | int, ...]) -> tuple[str | int, ...] | None:
    """The path of the node that `path` leads into or ends at; None outside nodes."""
    if path[:1] != ("nodes",) or len(path) < 2:
        return None
    nested = len(path) > 3 and path[2] == "nodes"
    return path[:4] if nested else path[:2]
