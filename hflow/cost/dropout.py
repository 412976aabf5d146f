"""What dropout of an adapter costs: its masks, which are made anew in each pass and never kept."""

from __future__ import annotations

from functools import lru_cache

from hflow.cost.device import stream_s
from hflow.cost.execution import Execution
from hflow.plan.frozen import moved_parameters
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import LORA_A

# Per input that may be dropped: reads and writes of 20 operations on int32 masks, and of the input itself.
# Measured on a CPU core: as long as streaming 75 to 130 bytes.
MASK_BYTES = 100


def masks_s(run: Execution, tokens: float) -> float:
    """Of a micro-batch of `tokens` in the layers of a stage, in one pass."""
    adapter = run.shape.adapter
    if adapter is None or not adapter.dropout:
        return 0.0
    whole, split = _inputs(run.shape)
    whole = whole / run.mesh.tp if run.strategy.sp else whole
    inputs = tokens * (whole + split / run.mesh.tp) / run.mesh.pp
    return stream_s(MASK_BYTES * inputs, run.device)


@lru_cache(maxsize=256)
def _inputs(shape: ModelShape) -> tuple[int, int]:
    """Columns of all A: of those that each rank of tp has whole, and of those that tp splits."""
    halves = [p for p in moved_parameters(shape) if p.name.endswith(LORA_A)]
    split = sum(p.shape[1] for p in halves if p.shard == 1)
    return sum(p.shape[1] for p in halves) - split, split
