"""The shape of the section `run`: how a run is kept, which is no part of the graph."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hflow.graph.run_config import TrackerName
from hflow.graph.source.schema_values import (
    COLUMN,
    METRIC_PATTERN,
    DurationS,
    FailureCode,
    KnownKeys,
    Natural,
    Positive,
    texts,
)

CHECKPOINT, HANG, SAMPLES = ("run", "checkpoint"), ("run", "hang"), ("run", "samples")
REPLAN = ("run", "replan")


def _checkpoint(value: Any) -> Any:
    if value is False:
        return {"every": 0, "seconds": 0, "on_signal": False}
    if isinstance(value, int) and value is not True:
        return {"every": value}
    if not isinstance(value, dict):
        raise PydanticCustomError("checkpoint_type", "expected a number of steps, a mapping, or false")
    return value  # pyright: ignore[reportUnknownVariableType]


def _hang(value: Any) -> Any:
    if value is False:
        return {"factor": 0.0}
    if not isinstance(value, dict):
        raise PydanticCustomError("hang_type", "expected a mapping, or false")
    return value  # pyright: ignore[reportUnknownVariableType]


def _samples(value: Any) -> Any:
    if value is False:
        return {"every": 0}
    if isinstance(value, int) and value is not True:
        return {"every": value}
    if not isinstance(value, dict):
        raise PydanticCustomError("samples_type", "expected a number of steps, a mapping, or false")
    return value  # pyright: ignore[reportUnknownVariableType]


def _replan(value: Any) -> Any:
    if value is False:
        return {"every": 0}
    if value is True:
        return {}
    if isinstance(value, int):
        return {"every": value}
    if not isinstance(value, dict):
        raise PydanticCustomError("replan_type", "expected a number of steps, a mapping, true or false")
    return value  # pyright: ignore[reportUnknownVariableType]


class CheckpointSpec(KnownKeys):
    """When a run writes checkpoints, and how many of them stay; a number of steps is short for `every`, and
    false for none."""

    every: Natural = 0
    seconds: DurationS = 0.0
    keep: Positive = 2
    best: Annotated[str, Field(pattern=METRIC_PATTERN, description="a column of metrics.jsonl")] = ""
    mode: Literal["max", "min"] = "max"
    on_signal: bool = True


class HangSpec(KnownKeys):
    """When an instruction takes so long that the run counts as hung; false for never. Seconds but for
    `factor`."""

    factor: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 10.0
    least: DurationS = 300.0
    first: DurationS = 14400.0


class SamplesSpec(KnownKeys):
    """Which samples a run keeps; a number of steps is short for `every`, and false for none."""

    every: Natural = 10
    rows: Positive = 1024
    keep_mb: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 100.0


class ReplanSpec(KnownKeys):
    """When a run goes on under a plan that was made for the lengths that it sees; a number of steps is short
    for `every`, true for the defaults, and false for never."""

    every: Natural = 10
    moved: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.2
    gain: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 2.0


NEVER_REPLANNED = ReplanSpec(every=0)


ColumnName = Annotated[str, Field(pattern=rf"^{COLUMN}$", description="a column of metrics.jsonl")]


class RunSpec(KnownKeys):
    """How a run is kept. No part of the graph."""

    checkpoint: Annotated[CheckpointSpec, BeforeValidator(_checkpoint)] = CheckpointSpec()
    export: Literal["last", "best", "none"] = "last"
    restarts: Natural = 0
    grace: DurationS = 30.0
    retry: Annotated[list[FailureCode], BeforeValidator(texts)] = []
    elastic: bool = False
    wait: DurationS = 60.0
    hang: Annotated[HangSpec, BeforeValidator(_hang)] = HangSpec()
    samples: Annotated[SamplesSpec, BeforeValidator(_samples)] = SamplesSpec()
    trackers: Annotated[list[TrackerName], BeforeValidator(texts)] = []
    replan: Annotated[ReplanSpec, BeforeValidator(_replan)] = NEVER_REPLANNED
    show: Annotated[list[ColumnName], BeforeValidator(texts)] = []


class RunFileSpec(KnownKeys):
    """The file ``run.yaml`` of a run folder."""

    run: RunSpec
