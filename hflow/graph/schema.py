"""The shape of a graph file: keys, kinds and bounds of everything but the meaning.

These pydantic models stand at the file boundary only; the graph is made of frozen dataclasses.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

NAME_PATTERN = r"^[a-z_][a-z0-9_]*$"
REF_PATTERN = r"^[a-z_][a-z0-9_]*\.[a-z_][a-z0-9_]*$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
RefText = Annotated[str, Field(pattern=REF_PATTERN, description="node.port")]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=False)


def _plain_scalar(value: Any) -> Any:
    finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, (bool, int, float, str)) or not finite:
        raise PydanticCustomError("plain_scalar", "expected a number, a string, true or false")
    return value


def _use(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


class ModelSpec(_Shape):
    path: str
    head: Literal["lm"] = "lm"
    frozen: bool = False
    dtype: Literal["f32", "bf16"] = "f32"


class UseSpec(_Shape):
    """`lag`: how many updates old the weights may be."""

    use: str
    lag: int = Field(0, ge=0)


class LoopSpec(_Shape):
    name: Name
    times: int = Field(gt=0)


class EvalSpec(_Shape):
    metric: RefText
    rows: int = Field(gt=0)
    every: int = Field(0, ge=0)


class RepeatSpec(_Shape):
    epochs: int = Field(1, gt=0)
    minibatch: int | None = Field(None, gt=0)


ModelUseSpec = Annotated[UseSpec, BeforeValidator(_use)]


class _NodeSpec(_Shape):
    with_: dict[str, Any] = Field({}, alias="with")


class _ReadingSpec(_NodeSpec):
    in_: dict[str, RefText] = Field({}, alias="in")


class DataSpec(_NodeSpec):
    op: Literal["data"]
    out: dict[Name, str] = Field(min_length=1)


class GenerateSpec(_ReadingSpec):
    op: Literal["generate"]
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


NodeSpec = Annotated[DataSpec | GenerateSpec | ScoreSpec | TrainSpec | CallSpec, Field(discriminator="op")]


class GraphSpec(_Shape):
    hflow: Literal[1]
    name: Name
    doc: str = ""
    params: dict[Name, Annotated[Any, AfterValidator(_plain_scalar)]] = {}
    seed: int = Field(0, ge=0, lt=2**63)  # counter-based sampling takes it as an int64
    models: dict[Name, ModelSpec] = {}
    loop: LoopSpec
    eval: EvalSpec | None = None
    nodes: dict[Name, NodeSpec] = Field(min_length=1)


OPS: dict[str, type[_NodeSpec]] = {
    "data": DataSpec,
    "generate": GenerateSpec,
    "score": ScoreSpec,
    "train": TrainSpec,
    "call": CallSpec,
}
# Mappings whose keys are the user's own names.
NAMED_SECTIONS = (("params",), ("models",), ("nodes",))


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
        case ("models", _):
            return _keys(ModelSpec)
        case ("nodes", _):
            return _keys(OPS[op]) if op in OPS else ("op",)
        case ("nodes", _, "repeat"):
            return _keys(RepeatSpec)
        case ("nodes", _, "model"):
            return _keys(UseSpec)
        case _:
            return None


def _keys(shape: type[BaseModel]) -> tuple[str, ...]:
    return tuple(f.alias or name for name, f in shape.model_fields.items())
