"""Plan -> Run: steps, evaluations, exports; leave the run folder whole whatever happens."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from hflow import units
from hflow.diagnostics import Diagnostic, HflowError, Terminated, render, source_of
from hflow.ending_signals import EndingSignals
from hflow.graph.run_config import DEFAULT_RUN, RunConfig
from hflow.graph.run_file import check_run_config
from hflow.plan.digests import changed_functions, check_models
from hflow.plan.plan import Plan
from hflow.plan.verify.runnable import check_runnable
from hflow.runtime.controller.attempts import Attempts, Replan, trained_models
from hflow.runtime.controller.checkpoints import complete
from hflow.runtime.controller.elastic import workers_by_host
from hflow.runtime.controller.former_run import FormerRun, former_run
from hflow.runtime.controller.inline_pool import InlinePool
from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.controller.pool import Pool
from hflow.runtime.controller.run_folder import RunFolder
from hflow.runtime.controller.run_views import NO_VIEWS, RunViews
from hflow.runtime.controller.tracking import Tracking
from hflow.runtime.controller.worker_failure import WorkerFailure
from hflow.runtime.replan.replanner import Replanner
from hflow.runtime.replan.search import PlanForLengths
from hflow.runtime.run import Run, summary
from hflow.runtime.whole_folder import remove_unfinished


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
    replan: Replan | None = None,
    replan_for_lengths: PlanForLengths | None = None,
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
        replan: compiles the plan's graph for the devices that are left, where `config` is elastic;
            `hflow.execute` hands in `hflow.compiler.replan`.
        replan_for_lengths: compiles it for the lengths that the run sees, where `config` asks for that
            (HF404 without it); handed in from there, too.

    Raises:
        HflowError: when the run cannot start or fails; the run folder then says ``failed``. A plan that only
            compiles, or whose models have changed since, is refused before there is one (HF406); so are a
            `config` that the graph cannot have (HF1xx, HF228) and a tracker that is not installed (HF404).
        KeyboardInterrupt, Terminated: after workers have been ended and the folder completed.
    """
    check_runnable(plan)
    check_models(plan.graph, plan.digests)
    check_run_config(config, plan.graph)
    trackers = views.trackers(config.trackers)
    if config.replan.every and replan_for_lengths is None:
        raise HflowError(Diagnostic("HF404", "nobody has handed in what plans for other lengths"))
    console = console or RunConsole(stderr=True)
    with EndingSignals() as signals:
        former = _former(run_dir, console) if resume else None
        folder = RunFolder(run_dir, plan, config, former)
        signals.notice = f"ending the workers and completing {folder.path} …"
        run, started = Run(folder.path, metrics=folder.metrics), time.time()
        if former:
            run.evaluations, run.evaluated = dict(former.evaluations), dict(former.evaluated)
            started -= former.wall_s
        error = None
        try:
            _begin(plan, folder, run, former, console)
            folder.tracking = Tracking(trackers, partial(_say, console))
            folder.tracking.begin(folder.tracked(former.step if former else 0))
            _tell_changed(plan, folder, console)
            make, policy = replan_for_lengths, config.replan
            replanner = Replanner(policy, make, folder.event) if make and policy.every else None
            hosts = workers_by_host(plan, is_whole=replanner is not None)
            with _pool(pool, plan, hosts, address, workers, console, signals) as own, signals.interruptible():
                attempts = Attempts(
                    plan, own, folder, run, signals, console, views, export, replan, replanner
                )
                attempts.make(former)
                if table := views.table(folder.plan, folder.metrics_of_plan):
                    _say(console, table)
                if lengths := views.lengths(folder.path, folder.plan):
                    _say(console, "\n" + lengths)
            run.status = "finished"
        except BaseException as raised:
            error = raised
            run.status = _ended_by(raised, signals)
        run.wall_s = time.time() - started
        told = _finish(folder, run, error, signals, views)
        if run.status == "failed":
            _say(console, f"the run failed; details in {folder.path / 'error.txt'}")
        if run.status != "finished" and (steps := list(complete(folder.path))):
            flags = " --workers inline" if workers == "inline" else ""
            _say(console, f"to go on from step {max(steps)}: hflow exec --resume {folder.path}{flags}")
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
    done = ", which are all that `loop.times` asks for" if former.step >= plan.graph.steps else ""
    _say(console, f"resuming {former.folder} {after}{done}")


def _ended_by(error: BaseException, signals: EndingSignals) -> Literal["failed", "interrupted"]:
    """What breaks after a signal broke by it."""
    is_asked = signals.asked or isinstance(error, (KeyboardInterrupt, Terminated))
    return "interrupted" if is_asked else "failed"


@contextmanager
def _pool(
    given: Pool | None,
    plan: Plan,
    hosts: Sequence[int],
    address: str | None,
    workers: str,
    console: Console,
    signals: EndingSignals,
) -> Iterator[Pool]:
    """The given workers, or others that end with the block."""
    if given:
        try:
            yield given
        finally:
            given.watch(None)
        return
    pool = _start(plan, hosts, address, workers, console, signals)
    try:
        yield pool
    finally:
        pool.close()


def _finish(
    folder: RunFolder,
    run: Run,
    error: BaseException | None,
    signals: EndingSignals,
    views: RunViews,
) -> BaseException | None:
    """Complete the folder; what ended the run. The summary comes last, when nothing can change the status any
    more: a signal or a full disk may, while the views are written."""
    plan = folder.plan
    for model in trained_models(plan):
        remove_unfinished(folder.export(model))
    run.diagnostics = error.diagnostics if isinstance(error, HflowError) else ()
    folder.draw(views, summary(plan, run), run.diagnostics)
    if _is_worse(folder, run, signals):
        folder.draw(views, summary(plan, run), run.diagnostics)
    _end_trackers(folder, run.status)
    folder.close(run.status, _error_text(error or folder.problem) if run.status == "failed" else "")
    _is_worse(folder, run, signals)
    folder.summarise(summary(plan, run))
    if _is_worse(folder, run, signals):
        folder.summarise(summary(plan, run))
    return error or folder.problem


def _end_trackers(folder: RunFolder, status: str) -> None:
    names = ("graph.yaml", "plan.json", "run.yaml", "report.html", "samples.html")
    folder.tracking.finish(status, [file for name in names if (file := folder.path / name).is_file()])


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


def _start(
    plan: Plan,
    hosts: Sequence[int],
    address: str | None,
    workers: str,
    console: Console,
    signals: EndingSignals,
) -> Pool:
    platform = plan.cluster.device.platform
    if workers == "inline":
        return InlinePool(platform)
    _say(console, f"starting {units.plural(sum(hosts), f'{platform} worker')} …")
    local = None if address else LocalRay()
    try:
        # Ray reads its settings when it is imported
        from hflow.runtime.controller.ray_pool import RayPool
        from hflow.runtime.controller.ray_session import let_ray_take_its_signals

        let_ray_take_its_signals()
        signals.install()
        return RayPool(hosts, local or address or "auto", platform, partial(_say, console))
    except BaseException:
        if local:
            local.remove()
        raise


def _error_text(error: BaseException | None) -> str:
    """Of error.txt: diagnostics and the failing worker's traceback, or our own for a defect of hflow."""
    texts = ["".join(traceback.format_exception(error))]
    if isinstance(error, HflowError):
        texts = [str(error)]
    if isinstance(error, WorkerFailure):
        texts.append(error.trace)
    return "\n\n".join(texts).strip() + "\n"
