"""The state of a run, written by its workers as they write a checkpoint, for another plan to go on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hflow.graph.run_config import CheckpointPolicy
from hflow.plan.plan import Plan
from hflow.runtime.checkpoint.manifest import name_of
from hflow.runtime.controller.best_checkpoint import NO_SCORES
from hflow.runtime.controller.checkpoints import FOLDER, Checkpoints, complete
from hflow.runtime.controller.pool import Pool


def keep_state(plan: Plan, pool: Pool, folder: Path, done: int, say: Callable[[str], None]) -> Path | None:
    """Have all workers write the state after `done` steps into `folder`.

    Returns:
        The checkpoint, or None where it could not be written, which `say` tells.
    """
    kept = Checkpoints(folder, plan, CheckpointPolicy(), max(plan.devices) + 1, _nothing, say)
    method, *arguments = kept.begin(done)
    for reports in (pool.call(method, *arguments), pool.call("end_checkpoint")):
        kept.add(reports, lambda: NO_SCORES)
    return folder / FOLDER / name_of(done) if done in complete(folder) else None


def _nothing(kind: str, **fields: Any) -> None:
    """It is no checkpoint of the run."""
