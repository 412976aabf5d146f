"""Values that several sections of a graph file have: names, references, bounded numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[a-z_][a-z0-9_]*$"
REF_PATTERN = r"^[a-z_][a-z0-9_]*\.[a-z_][a-z0-9_]*$"
COLUMN = r"[a-z_][a-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?"  # of metrics.jsonl
METRIC_PATTERN = rf"^({COLUMN}|eval/[a-z_][a-z0-9_]*/[A-Za-z_][A-Za-z0-9_@-]*)?$"
METRIC_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_@-]*$"

_INT64 = 2**63  # sizes, steps and seeds are int64s

Positive = Annotated[int, Field(gt=0, lt=_INT64)]
Natural = Annotated[int, Field(ge=0, lt=_INT64)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
PathText = Annotated[str, Field(min_length=1)]
MetricName = Annotated[str, Field(pattern=METRIC_NAME_PATTERN)]
RefText = Annotated[str, Field(pattern=REF_PATTERN, description="node.port")]
FailureCode = Annotated[str, Field(pattern=r"^HF4[0-9][0-9]$", description="of a failure, as HF401")]
Tokens = Annotated[float, Field(ge=0, allow_inf_nan=False)]
DurationS = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class KnownKeys(BaseModel):
    """A mapping of known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=False)


def texts(value: Any) -> Any:
    """One text is short for a list of it."""
    return [value] if isinstance(value, str) else value
