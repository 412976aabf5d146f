"""The steps of a run and its exports, begun again from the newest checkpoint where something failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Console

from hflow import units
from hflow.diagnostics import Diagnostic, HflowError
from hflow.ending_signals import EndingSignals
from hflow.plan.cluster import Cluster
from hflow.plan.plan import Plan
from hflow.runtime.checkpoint.export import export_checkpoint
from hflow.runtime.controller.best_checkpoint import best_of, scores
from hflow.runtime.controller.checkpoints import FOLDER, Checkpoints, complete, name_of
from hflow.runtime.controller.elastic import smaller_clusters, workers_by_host
from hflow.runtime.controller.former_run import FormerRun, former_run
from hflow.runtime.controller.hang_report import HUNG, HangReport
from hflow.runtime.controller.load_run import load_run, place_and_load
from hflow.runtime.controller.pool import DevicesMissing, Pool
from hflow.runtime.controller.progress import RunProgress, further_metrics
from hflow.runtime.controller.run_folder import RunFolder
from hflow.runtime.controller.run_views import RunViews
from hflow.runtime.controller.shared_folder import writers
from hflow.runtime.controller.step_loop import StepLoop
from hflow.runtime.controller.watch import Watch
from hflow.runtime.replan.keep_state import keep_state
from hflow.runtime.replan.replanner import NewPlan, Replanner
from hflow.runtime.replan.state_folder import state_folder
from hflow.runtime.replan.told import switched_text
from hflow.runtime.run import Run

FAILED_WORKER, UNAVAILABLE = ("HF402", HUNG), "HF404"
BACKOFF_S, MOST_BACKOFF_S = 2.0, 60.0  # from the second restart on that follows without a new checkpoint
TRIED_CLUSTERS = 8

Replan = Callable[[Plan, Cluster], Plan]  # the plan's graph, compiled for another cluster


@dataclass
class Attempts:
    """`replan` compiles for the devices that are left, where the run may go on with those (`elastic`);
    `replanner` says when to go on under a plan for other lengths, where the run may (`replan`)."""

    wanted: Plan  # that the run was begun with, or has gone on under for other lengths
    pool: Pool
    folder: RunFolder
    run: Run
    signals: EndingSignals
    console: Console
    views: RunViews
    export: bool
    replan: Replan | None
    replanner: Replanner | None
    _has_begun: bool = field(default=False, init=False)

    def make(self, former: FormerRun | None) -> None:
        """All steps that `former` has not done, and the exports.

        Raises:
            HflowError: what failed when the run may not begin again any more, or not after that.
        """
        begun, in_a_row = 0, 0
        while True:
            newest = max(complete(self.folder.path), default=-1)
            try:
                if self._attempt(former):
                    return
                former = self._grow()
            except HflowError as failure:
                if self.replan and self._can_shrink(failure):
                    former = self._shrink(self.replan, failure)
                    continue
                left = self.folder.config.restarts - begun
                if left <= 0 or self.signals.asked or not self._is_tried_again(failure):
                    raise
                is_stuck = max(complete(self.folder.path), default=-1) <= newest
                begun, in_a_row = begun + 1, in_a_row + 1 if is_stuck else 0
                former = self._begin_again(failure, left - 1, in_a_row)

    def _attempt(self, former: FormerRun | None) -> bool:
        """Whether all is done; else there is room again for the plan that is wanted."""
        folder, pool, plan = self.folder, self.pool, self.folder.plan
        policy, size = folder.config.checkpoint, max(plan.devices) + 1
        pool.watch(self._watch(plan))
        writing = writers(plan, folder.config, self.export)
        former, load_s = load_run(plan, pool, folder, former, writing, self._back_to, self._say)
        self._has_begun = True
        if former:
            folder.loaded(former.step)
        if self.replanner:
            self.replanner.begin(plan, load_s)
        first = former.step if former else 0
        checkpoints = Checkpoints(folder.path, plan, policy, size, folder.event, self._say, first)
        grace_s, shown = folder.config.grace_s, folder.config.show
        notice = f"ending the step and writing a checkpoint within {grace_s:g} s; the next signal leaves"
        further = further_metrics(plan.graph)
        with (
            RunProgress(plan.graph.steps, pool.where, self.console, folder.now, shown, further) as progress,
            _removing(checkpoints),
        ):
            with self.signals.graceful(grace_s, notice) if policy.on_signal else nullcontext():
                is_left = self._make_steps(first, checkpoints, progress)
            self.signals.check()  # one that a function of the user's may have swallowed, too
        if not is_left:  # without checkpoints the exports are all that is left of the steps
            notice = f"writing the trained models within {grace_s:g} s; the next signal leaves"
            with self.signals.graceful(grace_s, notice) if policy.on_signal else nullcontext():
                self._write_exports()
        return not is_left

    def _make_steps(self, first: int, checkpoints: Checkpoints, progress: RunProgress) -> bool:
        """Steps `first` and those after it, under one plan after the other; whether some are left."""
        while True:
            plan = self.folder.plan
            replanner = self.replanner if plan is self.wanted else None  # not while devices are missing
            loop = StepLoop(
                plan, self.pool, self.folder, checkpoints, self.run, progress, self.signals, first,
                self._may_grow, replanner,
            )  # fmt: skip
            loop.run()
            if replanner is None or loop.switch is None:
                return loop.is_left
            chosen, first = loop.switch
            self._switch(replanner, chosen, first, checkpoints)

    def _switch(self, replanner: Replanner, chosen: NewPlan, done: int, checkpoints: Checkpoints) -> None:
        """Go on under another plan after `done` steps, in the same workers. Where the state could not be
        written, under the same one."""
        before, plan, pool, folder = self.folder.plan, chosen.plan, self.pool, self.folder
        began = time.perf_counter()
        with state_folder(folder.path, pool, replanner.state_bytes, plan.cluster.hosts == 1) as place:
            state = keep_state(before, pool, place, done, self._say)
            if state is None:
                replanner.refuse(plan)
                return
            pool.watch(self._watch(plan))
            try:
                load_s = place_and_load(plan, pool, folder, state, writers(plan, folder.config, self.export))
            except HflowError:
                replanner.refuse(plan)
                raise
        switch_s = time.perf_counter() - began
        self.wanted = plan
        folder.replan(plan, done)
        checkpoints.go_on_under(plan, max(plan.devices) + 1)
        replanner.begin(plan, load_s, switch_s)
        figures = {
            "old_s": chosen.old_s,
            "new_s": chosen.new_s,
            "cost_s": chosen.cost_s,
            "switch_s": switch_s,
        }
        folder.event("replanned", plan=plan.hash, cluster=plan.cluster.name, step=done, **figures)
        self._say(switched_text(before, chosen, done, switch_s, self.views.changes(before, plan)))

    def _watch(self, plan: Plan) -> Watch | None:
        """A new one for each attempt: kernels are compiled again, and all takes longer the first time."""
        policy, report = self.folder.config.hang, HangReport(plan.graph, self.folder, self._say)
        return Watch(plan, policy, report) if policy.factor else None

    def _is_tried_again(self, failure: HflowError) -> bool:
        """What was not available at the start is not lost."""
        code = failure.diagnostics[0].code
        if code == UNAVAILABLE:
            return self._has_begun
        return code in (*FAILED_WORKER, *self.folder.config.retry)

    def _begin_again(self, failure: HflowError, left: int, in_a_row: int) -> FormerRun:
        """Workers anew, for the devices that are there; what to go on from."""
        cause = failure.diagnostics[0].message
        self.folder.event("restarting", cause=cause, restarts_left=left)
        self._say(f"{cause}\nstarting the workers again ({units.plural(left, 'more restart')})")
        if in_a_row > 1:
            time.sleep(min(BACKOFF_S * 2 ** (in_a_row - 2), MOST_BACKOFF_S))
        self.pool.renew(self._hosts())
        return self._rewind(self.wanted)

    def _hosts(self) -> tuple[int, ...]:
        """How many workers each host has while no devices are missing."""
        return workers_by_host(self.wanted, is_whole=self.replanner is not None)

    def _grow(self) -> FormerRun:
        self._say("lost devices are back")
        self.folder.event("growing")
        self.pool.renew(self._hosts())
        return self._rewind(self.wanted)

    def _may_grow(self) -> bool:
        """Whether there is room again for the plan that is wanted; asked when a checkpoint begins."""
        return self.folder.plan is not self.wanted and self.pool.has_room(self._hosts())

    def _rewind(self, plan: Plan) -> FormerRun:
        """Back to the newest checkpoint, or to the beginning, under `plan`."""
        former = former_run(self.folder.path, lambda error: self._say(f"passed over: {error}"))
        before, self.folder.plan = self.folder.plan, plan
        self._back_to(former)
        if plan is not before:
            self.folder.event("replanned", plan=plan.hash, cluster=plan.cluster.name, step=former.step)
            self._say(f"another plan, for {plan.cluster.name}:\n{self.views.changes(before, plan)}")
        self._say(f"going on {f'from step {former.step}' if former.checkpoint else 'from the beginning'}")
        return former

    def _back_to(self, former: FormerRun) -> None:
        self.folder.rewind(former)
        self.run.metrics = self.folder.metrics
        self.run.evaluations = dict(former.evaluations)
        self.run.evaluated = dict(former.evaluated)

    def _can_shrink(self, failure: HflowError) -> bool:
        is_lacking = isinstance(failure, DevicesMissing) and self._has_begun
        return is_lacking and self.folder.config.elastic and not self.signals.asked

    def _shrink(self, replan: Replan, failure: HflowError) -> FormerRun:
        """Under a plan for fewer devices than the one that lacked some. DevicesMissing when there is none."""
        problem, below = "", max(self.folder.plan.devices) + 1
        clusters = smaller_clusters(self.wanted.cluster, self.pool.rooms(), below)
        for cluster in islice(clusters, TRIED_CLUSTERS):
            try:
                plan = replan(self.wanted, cluster)
            except HflowError as error:
                problem = problem or f"for {cluster.name}: {error.diagnostics[0].message}"
                continue
            self._say(failure.diagnostics[0].message)
            self.pool.renew(workers_by_host(plan))
            return self._rewind(plan)
        help_ = "`hflow exec --resume RUN --cluster …` goes on with another cluster"
        message = f"too few devices are left for any plan{f' ({problem})' if problem else ''}"
        raise DevicesMissing(Diagnostic(UNAVAILABLE, message, help=help_)) from failure

    def _write_exports(self) -> None:
        folder, plan = self.folder, self.folder.plan
        kind = folder.config.export
        for model in trained_models(plan) if self.export and kind != "none" else ():
            target = folder.export(model).absolute()
            best = self._best() if kind == "best" else None
            if best is None:
                self.pool.call("export", model, str(target))
            else:
                export_checkpoint(plan, folder.path / FOLDER / name_of(best), {model: target})
            folder.event("exported", model=model, step=best or plan.graph.steps)

    def _best(self) -> int | None:
        """The step of the best checkpoint that is there."""
        folder, policy = self.folder, self.folder.config.checkpoint
        evaluated = self.run.evaluations, self.run.evaluated
        known = scores(folder.plan.graph, policy.best, folder.metrics, *evaluated)
        return best_of([*complete(folder.path)], policy, known)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def trained_models(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n.model.model for n in plan.graph.nodes if n.op == "train" and n.model))


@contextmanager
def _removing(checkpoints: Checkpoints) -> Iterator[None]:
    """What was not completed goes, however the block is left."""
    try:
        yield
    finally:
        checkpoints.clear()
