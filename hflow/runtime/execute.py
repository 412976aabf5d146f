"""Plan -> Run: evaluate, step, evaluate, export; leave the run folder whole whatever happens."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from hflow import units
from hflow.diagnostics import Diagnostic, HflowError, Terminated, render, source_of
from hflow.display import Displayed
from hflow.ending_signals import EndingSignals
from hflow.graph.run_config import DEFAULT_RUN, RunConfig
from hflow.graph.run_file import check_run_config
from hflow.plan.digests import changed_functions, check_models
from hflow.plan.plan import Plan
from hflow.plan.verify.runnable import check_runnable
from hflow.runtime.checkpoint.export import export_checkpoint
from hflow.runtime.controller.checkpoints import FOLDER, Checkpoints, best_of, complete, name_of, scores
from hflow.runtime.controller.former_run import FormerRun, former_run
from hflow.runtime.controller.inline_pool import InlinePool
from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.controller.pool import Pool, WorkerFailure
from hflow.runtime.controller.progress import RunProgress
from hflow.runtime.controller.run_folder import RunFolder
from hflow.runtime.controller.run_views import NO_VIEWS, RunViews
from hflow.runtime.controller.step_loop import StepLoop
from hflow.runtime.whole_folder import remove_unfinished

LOST = "HF402"  # a worker


@dataclass
class Run(Displayed):
    """What a run did. `metrics`: the lines of metrics.jsonl; `evaluations`: the metric by finished steps."""

    folder: Path
    status: Literal["running", "finished", "failed", "interrupted"] = "running"
    metrics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    wall_s: float = 0.0
    diagnostics: tuple[Diagnostic, ...] = ()


def execute(
    plan: Plan,
    run_dir: Path | None = None,
    address: str | None = None,
    workers: Literal["ray", "inline"] = "ray",
    pool: Pool | None = None,
    export: bool = True,
    console: Console | None = None,
    views: RunViews = NO_VIEWS,
    config: RunConfig = DEFAULT_RUN,
    resume: bool = False,
) -> Run:
    """Run `plan` to its end.

    Args:
        run_dir: the folder to fill; by default ``runs/<name>-<time>``.
        address: of a running Ray cluster to join; by default hflow starts Ray here and ends it.
        workers: ``inline`` runs a one-device plan in this process.
        pool: workers to use and leave alive, instead of starting some.
        export: write each trained model to ``export/<model>`` at the end.
        views: what is drawn of the run for people; `hflow.execute` hands in its report and its trace.
        config: how the run is kept, as the section `run` of a graph file says it; it is written to
            ``run.yaml``.
        resume: go on with the run in `run_dir` from its newest checkpoint, or from the beginning where it has
            none. The plan may be another, of the same graph or of one whose differences are accepted
            (`hflow.graph.changes`).

    Raises:
        HflowError: when the run cannot start or fails; the run folder then says ``failed``. A plan that only
            compiles, or whose models have changed since, is refused before there is one (HF406); so is a
            `config` that the graph cannot have (HF1xx, HF228).
        KeyboardInterrupt, Terminated: after workers have been ended and the folder completed.
    """
    check_runnable(plan)
    check_models(plan.graph, plan.digests)
    check_run_config(config, plan.graph)
    console = console or RunConsole(stderr=True)
    with EndingSignals() as signals:
        former = _former(run_dir, console) if resume else None
        folder = RunFolder(run_dir, plan, config, former)
        signals.notice = f"ending the workers and completing {folder.path} …"
        run, started = Run(folder.path, metrics=folder.metrics), time.time()
        if former:
            run.evaluations, started = dict(former.evaluations), started - former.wall_s
        error = None
        try:
            _begin(plan, folder, run, former, console)
            _tell_changed(plan, folder, console)
            with _pool(pool, plan, address, workers, console, signals) as own, signals.interruptible():
                _run(plan, own, folder, run, signals, export, console, former)
                if table := views.table(plan, folder.metrics):
                    _say(console, table)
            run.status = "finished"
        except BaseException as raised:
            error = raised
            run.status = _ended_by(raised, signals)
        run.wall_s = time.time() - started
        told = _finish(plan, folder, run, error, signals, views)
        if run.status == "failed":
            _say(console, f"the run failed; details in {folder.path / 'error.txt'}")
        if run.status != "finished" and (steps := list(complete(folder.path))):
            _say(console, f"to go on from step {max(steps)}: hflow exec --resume {folder.path}")
        if folder.problem and folder.problem is not told:
            _say(console, str(folder.problem))
        if run.status == "interrupted":
            signals.check()
        if told:
            raise told
    return run


def _former(folder: Path | None, console: Console) -> FormerRun:
    """HF407 when there is nothing to go on with."""
    if folder is None:
        raise HflowError(Diagnostic("HF407", "`resume` needs `run_dir`, the folder of the run"))
    return former_run(folder, lambda error: _say(console, f"passed over: {error}"))


def _begin(plan: Plan, folder: RunFolder, run: Run, former: FormerRun | None, console: Console) -> None:
    """Until the run has ended, the summary says that it is running, and in which process."""
    folder.summarise(summary(plan, run) | {"pid": os.getpid(), "host": socket.gethostname()})
    if folder.problem:
        raise folder.problem
    if former is None:
        folder.event("started", plan=plan.hash)
        return
    folder.event("resumed", plan=plan.hash, step=former.step)
    after = f"after {units.plural(former.step, 'step')}" if former.checkpoint else "at its beginning"
    _say(console, f"resuming {former.folder} {after}")


def _ended_by(error: BaseException, signals: EndingSignals) -> Literal["failed", "interrupted"]:
    """What breaks after a signal broke by it."""
    is_asked = signals.asked or isinstance(error, (KeyboardInterrupt, Terminated))
    return "interrupted" if is_asked else "failed"


@contextmanager
def _pool(
    given: Pool | None,
    plan: Plan,
    address: str | None,
    workers: str,
    console: Console,
    signals: EndingSignals,
) -> Iterator[Pool]:
    """The given workers, or others that end with the block."""
    if given:
        yield given
        return
    pool = _start(plan, address, workers, console, signals)
    try:
        yield pool
    finally:
        pool.close()


def _finish(
    plan: Plan,
    folder: RunFolder,
    run: Run,
    error: BaseException | None,
    signals: EndingSignals,
    views: RunViews,
) -> BaseException | None:
    """Complete the folder; what ended the run. The summary comes last, when nothing can change the status any
    more: a signal or a full disk may, while the views are written."""
    for model in _trained(plan):
        remove_unfinished(folder.export(model))
    run.diagnostics = error.diagnostics if isinstance(error, HflowError) else ()
    folder.draw(views, summary(plan, run), run.diagnostics)
    if _is_worse(folder, run, signals):
        folder.draw(views, summary(plan, run), run.diagnostics)
    folder.close(run.status, _error_text(error or folder.problem) if run.status == "failed" else "")
    _is_worse(folder, run, signals)
    folder.summarise(summary(plan, run))
    if _is_worse(folder, run, signals):
        folder.summarise(summary(plan, run))
    return error or folder.problem


def _is_worse(folder: RunFolder, run: Run, signals: EndingSignals) -> bool:
    """Whether a run that had finished has not, after all: its status is put right."""
    if run.status != "finished" or not (folder.problem or signals.asked):
        return False
    run.status = "interrupted" if signals.asked else "failed"
    run.diagnostics = folder.problem.diagnostics if folder.problem else ()
    return True


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _tell_changed(plan: Plan, folder: RunFolder, console: Console) -> None:
    """Functions run as they are now, which may not be as they were when the graph was compiled."""
    for warning in changed_functions(plan.graph, plan.digests):
        _say(console, render(warning, source_of(warning)))
        folder.event("warning", code=warning.code, message=warning.message)


class RunConsole(Console):
    """A console that falls silent when nobody reads it any more (``hflow exec … | head``)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _start(plan: Plan, address: str | None, workers: str, console: Console, signals: EndingSignals) -> Pool:
    platform = plan.cluster.device.platform
    ranks = range(max(plan.devices) + 1)
    if workers == "inline":
        return InlinePool(platform)
    _say(console, f"starting {units.plural(len(ranks), f'{platform} worker')} …")
    local = None if address else LocalRay()
    try:
        # Ray reads its settings when it is imported
        from hflow.runtime.controller.ray_pool import RayPool
        from hflow.runtime.controller.ray_session import let_ray_take_its_signals

        let_ray_take_its_signals()
        signals.install()
        # in order of ranks: devices are numbered by host
        hosts = list(Counter(map(plan.cluster.host, ranks)).values())
        return RayPool(hosts, local or address or "auto", platform, partial(_say, console))
    except BaseException:
        if local:
            local.remove()
        raise


def _run(
    plan: Plan,
    pool: Pool,
    folder: RunFolder,
    run: Run,
    signals: EndingSignals,
    export: bool,
    console: Console,
    former: FormerRun | None,
) -> None:
    """All steps, begun again where workers were lost and the run may; then the exports."""
    for left in reversed(range(folder.config.restarts + 1)):
        try:
            _attempt(plan, pool, folder, run, signals, console, former)
            break
        except WorkerFailure as failure:
            if not left or signals.asked or failure.diagnostics[0].code != LOST:
                raise
            former = _rewind(folder, run, failure, left - 1, console)
            pool.renew()
    kind = folder.config.export
    for model in _trained(plan) if export and kind != "none" else ():
        target = folder.export(model).absolute()
        best = _best(plan, folder, run) if kind == "best" else None
        if best is None:
            pool.call("export", model, str(target))
        else:
            export_checkpoint(plan, model, folder.path / FOLDER / name_of(best), target)
        folder.event("exported", model=model, step=best or plan.graph.steps)


def _rewind(folder: RunFolder, run: Run, failure: WorkerFailure, left: int, console: Console) -> FormerRun:
    """Back to the newest checkpoint, or to the beginning."""
    cause = failure.diagnostics[0].message
    folder.event("restarting", cause=cause, restarts_left=left)
    former = former_run(folder.path, lambda error: _say(console, f"passed over: {error}"))
    after = f"from step {former.step}" if former.checkpoint else "from the beginning"
    more = units.plural(left, "more restart")
    _say(console, f"{cause}\nrestarting {after} ({more})")
    folder.rewind(former)
    run.metrics = folder.metrics
    run.evaluations.clear()
    run.evaluations.update(former.evaluations)
    return former


def _attempt(
    plan: Plan,
    pool: Pool,
    folder: RunFolder,
    run: Run,
    signals: EndingSignals,
    console: Console,
    former: FormerRun | None,
) -> None:
    """The steps that `former` has not done."""
    policy, size = folder.config.checkpoint, max(plan.devices) + 1
    folder.event("placed", nodes=pool.form(size))
    resumed = str(former.checkpoint.absolute()) if former and former.checkpoint else ""
    pool.call("load", plan, policy.writes, resumed)
    folder.event("loaded")
    checkpoints = Checkpoints(folder.path, plan, policy, size, folder.event, partial(_say, console))
    first = former.step if former else 0
    grace_s = folder.config.grace_s
    notice = f"ending the step and writing a checkpoint, for at most {grace_s:g} s; the next signal leaves"
    with RunProgress(plan.graph.steps, pool.where, console) as progress, _removing(checkpoints):
        loop = StepLoop(plan, pool, folder, checkpoints, run.evaluations, progress, signals, first)
        with signals.graceful(grace_s, notice) if policy.on_signal else nullcontext():
            loop.run()
        signals.check()  # one that a function of the user's may have swallowed, too


def _best(plan: Plan, folder: RunFolder, run: Run) -> int | None:
    """The step of the best checkpoint that is there."""
    policy, evaluation = folder.config.checkpoint, plan.graph.evaluation
    is_evaluated = evaluation is not None and str(evaluation.metric) == policy.best
    score = scores(folder.metrics, run.evaluations, policy.best, is_evaluated)
    known = [step for step in sorted(complete(folder.path)) if score(step) is not None]
    return next(iter(best_of(known, policy, score)), None)


def _trained(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n.model.model for n in plan.graph.nodes if n.op == "train" and n.model))


@contextmanager
def _removing(checkpoints: Checkpoints) -> Iterator[None]:
    """What was not completed goes, however the block is left."""
    try:
        yield
    finally:
        checkpoints.clear()


def summary(plan: Plan, run: Run) -> dict[str, Any]:
    """The object of summary.json."""
    step_s = sum(m["time_s"] for m in run.metrics)
    evaluations = run.evaluations
    before, after = evaluations.get(0), evaluations.get(plan.graph.steps)
    return {
        "status": run.status,
        "steps": len(run.metrics),
        "wall_s": run.wall_s,
        "tokens_per_s": sum(m["tokens"] for m in run.metrics) / step_s if step_s else 0.0,
        "eval": {"before": before, "after": after, "by_step": evaluations} if evaluations else None,
        "plan_hash": plan.hash,
        "graph": plan.graph.name,
        "seed": plan.graph.seed,
    }


def _error_text(error: BaseException | None) -> str:
    """Of error.txt: diagnostics and the failing worker's traceback, or our own for a defect of hflow."""
    texts = ["".join(traceback.format_exception(error))]
    if isinstance(error, HflowError):
        texts = [str(error)]
    if isinstance(error, WorkerFailure):
        texts.append(error.trace)
    return "\n\n".join(texts).strip() + "\n"
