"""Whether all workers that will write into the run folder see the one of the controller: on a host that lacks
the shared file system, files would land on a disk of its own, and be missed at the end."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.run_config import RunConfig
from hflow.plan.plan import Plan
from hflow.plan.run_state import trained_models
from hflow.runtime.controller.pool import Pool
from hflow.whole_file import unwritten


def check_shared(folder: Path, pool: Pool, nodes: Sequence[str], writers: Collection[int]) -> None:
    """Have each worker look for a file that is made here, and make one beside it.

    Args:
        nodes: of each rank.
        writers: the ranks that will write.

    Raises:
        HflowError: HF407 with the nodes on which that fails, and why.
    """
    mark = folder.absolute() / f".seen-{secrets.token_hex(16)}"
    try:
        mark.touch()
        reports = pool.call("look_for", str(mark))
    except OSError as error:
        raise unwritten(folder, error, "HF407") from None
    finally:
        with suppress(OSError):
            mark.unlink()
    addresses = [node.partition("/")[0] for node in nodes]
    problems = {addresses[rank]: reports[rank]["problem"] for rank in writers if reports[rank]["problem"]}
    if not problems:
        return
    where = "; ".join(f"on {node} it {problem}" for node, problem in problems.items())
    help_ = "workers write checkpoints, samples, models: give a folder that all hosts share with --run-dir"
    raise HflowError(Diagnostic("HF407", f"the run folder `{folder}` is not shared: {where}", help=help_))


def writers(plan: Plan, config: RunConfig, export: bool) -> Collection[int]:
    """The ranks that write into the run folder: all of them checkpoints, samples or the state for another
    plan, or one each model."""
    policy = config.checkpoint
    written = policy.every, policy.seconds, policy.on_signal, config.samples.every, config.replan.every
    if any(written):
        return range(max(plan.devices) + 1)
    models = trained_models(plan.graph) if export and config.export != "none" else ()
    return sorted({plan.node(plan.graph.trainers(model)[0].name).mesh.devices[0] for model in models})
