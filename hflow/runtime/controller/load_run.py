"""How workers get the plan, and the state that a run goes on from: that of the newest checkpoint they can
read."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from hflow.diagnostics import HflowError
from hflow.plan.plan import Plan
from hflow.runtime.controller.former_run import FormerRun, former_run
from hflow.runtime.controller.pool import Pool
from hflow.runtime.controller.run_folder import RunFolder
from hflow.runtime.controller.shared_folder import check_shared
from hflow.runtime.controller.worker_failure import WorkerFailure

UNUSABLE = "HF412"  # a checkpoint


def load_run(
    plan: Plan,
    pool: Pool,
    folder: RunFolder,
    former: FormerRun | None,
    writers: Collection[int],
    back_to: Callable[[FormerRun], None],
    say: Callable[[str], None],
) -> tuple[FormerRun | None, float]:
    """Have workers load `plan` and the checkpoint of `former`. Where they find that damaged (only they read
    it whole), the one before.

    Args:
        writers: the ranks that will write into the folder.
        back_to: is called with what is gone on from then.
        say: tells the user.

    Returns:
        `former`, or what is gone on from in its place; and what `place_and_load` returns.

    Raises:
        WorkerFailure: when a worker fails otherwise, or there is no checkpoint before.
        HflowError: HF407 when one of `writers` does not see the folder, or cannot write there.
    """
    while True:
        try:
            checkpoint = former.checkpoint if former else None
            return former, place_and_load(plan, pool, folder, checkpoint, writers)
        except WorkerFailure as failure:
            former = _one_before(former, failure, say)
            folder.event("passed_over", problem=failure.diagnostics[0].message, step=former.step)
            back_to(former)
            say(f"going on from step {former.step}")


def place_and_load(
    plan: Plan, pool: Pool, folder: RunFolder, checkpoint: Path | None, writers: Collection[int]
) -> float:
    """Have workers form the world of `plan`, and load it and the state in `checkpoint`.

    Returns:
        The seconds that loading took, without imports, which the next plan of these workers does not need.

    Raises:
        WorkerFailure: when a worker fails, also for a damaged checkpoint.
        HflowError: as `load_run`.
    """
    nodes = pool.form(max(plan.devices) + 1, folder.config.wait_s)
    folder.event("placed", nodes=nodes)
    check_shared(folder.path, pool, nodes, writers)
    began = time.perf_counter()
    reports = pool.call("load", plan, str(checkpoint.absolute()) if checkpoint else "")
    folder.event("loaded")
    return time.perf_counter() - began - max(report["import_s"] for report in reports)


def _one_before(former: FormerRun | None, failure: WorkerFailure, say: Callable[[str], None]) -> FormerRun:
    """What to go on from when workers could not read the checkpoint of `former`: never the beginning, since
    what fails with every checkpoint may be no damage."""
    found = failure.diagnostics[0]
    if former is None or former.checkpoint is None or found.code != UNUSABLE:
        raise failure
    tell: Callable[[HflowError], None] = lambda error: say(f"passed over: {error}")  # noqa: E731
    older = former_run(former.folder, tell, before=former.step)
    if older.checkpoint is None:
        help_ = f"`hflow runs rm {former.folder}@{former.step}` removes it"
        help_ += "; without any, a run that has not finished begins anew"
        raise WorkerFailure(replace(found, help=found.help or help_), failure.trace) from failure
    tell(failure)
    return older
