"""The calls of a run, in their order: steps, evaluations, checkpoints. All workers get them in one stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from hflow import units
from hflow.ending_signals import EndingSignals
from hflow.graph.ir import NamedEvaluation
from hflow.plan.plan import Plan
from hflow.runtime.controller.best_checkpoint import Scores, scores
from hflow.runtime.controller.checkpoints import Checkpoints
from hflow.runtime.controller.metrics import merge
from hflow.runtime.controller.pool import Pool, WorkerCall
from hflow.runtime.controller.progress import RunProgress
from hflow.runtime.controller.run_folder import RunFolder
from hflow.runtime.controller.worker_failure import WorkerReport
from hflow.runtime.controller.workers_log import WorkersLog
from hflow.runtime.replan.replanner import NewPlan, Replanner
from hflow.runtime.run import Run


class StepLoop:
    """Steps `first` and those after it. When a signal has come, no more calls are made but that of the
    checkpoint that is owed: also when the signal comes after the last of them."""

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        folder: RunFolder,
        checkpoints: Checkpoints,
        evaluated: Run,
        progress: RunProgress,
        signals: EndingSignals,
        first: int = 0,
        may_end: Callable[[], bool] = lambda: False,
        replanner: Replanner | None = None,
    ):
        """`evaluated`: of which evaluations are known, and where they are recorded. `may_end` is asked when a
        checkpoint has begun: whether to end there, with steps left. `replanner` hears of each step, and is
        asked between two of them for another plan: the loop ends where there is one."""
        self.plan, self.pool, self.folder, self.first = plan, pool, folder, first
        self.checkpoints, self.evaluated = checkpoints, evaluated
        self.progress, self.signals = progress, signals
        self.is_left = False  # whether it ended with steps left
        self.switch: tuple[NewPlan, int] | None = None  # the plan to go on under, after so many steps
        self._may_end, self._replanner = may_end, replanner
        self._log = WorkersLog(folder.path, progress.say)
        self._sent: deque[WorkerCall] = deque()
        self._done = first  # steps that are recorded
        self._ended = time.perf_counter()

    def run(self) -> None:
        """Each step is recorded when its last report has come, and has taken the time since the call before.

        Raises:
            WorkerFailure: when a worker fails; what is recorded stays.
        """
        for reports in self.pool.stream(self._calls()):
            self._record(self._sent.popleft(), reports)
        if self.signals.asked and self.checkpoints.is_owed(self._done):
            call = self.checkpoints.begin(self._done)
            self._record(call, self.pool.call(*call))
        self.checkpoints.add(self.pool.call("end_checkpoint"), self._scores)

    def _calls(self) -> Iterator[WorkerCall]:
        for call in self._wanted():
            self._sent.append(call)
            yield call

    def _wanted(self) -> Iterator[WorkerCall]:
        """Asked for one at a time, while those before are under way."""
        steps = self.plan.graph.steps
        for done in range(self.first, steps + 1):
            if self.checkpoints.is_due(done):
                yield self.checkpoints.begin(done)
                self.is_left = done < steps and not self.signals.asked and self._may_end()
                if self.is_left:
                    return
            if self.signals.asked:
                if self.checkpoints.is_owed(done):
                    yield self.checkpoints.begin(done)
                return
            if self._is_switched(done):
                return
            yield from self._evaluations(done)
            if done < steps:
                request = self.folder.samples.request(done, steps)
                yield ("run", done, False, "", request) if request else ("run", done, False)

    def _is_switched(self, done: int) -> bool:
        """Whether to go on under another plan after so many steps."""
        if self._replanner is None or not self.first < done < self.plan.graph.steps:
            return False
        chosen = self._replanner.plan_after(done)
        self.switch = (chosen, done) if chosen else None
        return chosen is not None

    def _evaluations(self, done: int) -> Iterator[WorkerCall]:
        """The evaluations of the weights after so many steps that have not been."""
        if self._evaluates(done):
            yield "run", done, True
        for named in self.plan.graph.evaluations:
            if named.is_due(done, self.plan.graph.steps) and not self._is_known(named, done):
                yield "run", done, True, named.name

    def _evaluates(self, done: int) -> bool:
        """Whether the held-out rows are run through the weights after so many steps."""
        evaluation = self.plan.graph.evaluation if self.plan.evaluation else None
        if not evaluation or done in self.evaluated.evaluations:
            return False
        return evaluation.is_due(done, self.plan.graph.steps)

    def _is_known(self, named: NamedEvaluation, done: int) -> bool:
        return all(done in self.evaluated.evaluated.get(key, {}) for key in named.keys)

    def _record(self, call: WorkerCall, reports: Sequence[WorkerReport]) -> None:
        began, self._ended = self._ended, time.perf_counter()
        if call[0] == "run":
            self._log.add(call[1], reports)
        match call:
            case "checkpoint", int(done), _:
                self.checkpoints.began(done, reports)
            case "run", int(done), True:
                self._evaluated(done, reports)
            case "run", int(done), True, str(name):
                self._named(name, done, reports, self._ended - began)
            case _:
                metrics = merge(self.plan.graph, call[1], reports, self._ended - began)
                self.folder.step(metrics, [event for report in reports for event in report["events"]])
                self._done = call[1] + 1
                self.folder.keep_lengths(reports)
                if self._replanner:
                    self._replanner.add(metrics, reports)
                if len(call) > 3:
                    self.folder.keep_samples(call[1], reports)
                self.progress.step(metrics)
        self.checkpoints.add(reports, self._scores)

    def _evaluated(self, done: int, reports: Sequence[WorkerReport]) -> None:
        """Record an evaluation after `done` steps."""
        evaluation = self.plan.graph.evaluation
        assert self.plan.evaluation and evaluation
        value = merge(self.plan.evaluation.graph, done, reports, 1.0)[str(evaluation.metric)]
        self.evaluated.evaluations[done] = value
        self.folder.event("evaluated", step=done, metric=str(evaluation.metric), value=value)
        after = units.plural(done, "step")
        text = f"held-out {evaluation.metric} after {after}: {value:.3f} ({evaluation.rows} rows, greedy)"
        self.progress.say(text)

    def _named(self, name: str, done: int, reports: Sequence[WorkerReport], seconds: float) -> None:
        """Record a named evaluation after `done` steps."""
        named = next(e for e in self.plan.graph.evaluations if e.name == name)
        merged = merge(self.plan.evaluating(name).graph, done, reports, 1.0)
        values = {key: merged[m.column(name)] for key, m in zip(named.keys, named.metrics)}
        for key, value in values.items():
            self.evaluated.evaluated.setdefault(key, {})[done] = value
        self.folder.event("evaluated", step=done, evaluation=name, time_s=seconds, metrics=values)
        told = ", ".join(f"{m.name} {value:.3f}" for m, value in zip(named.metrics, values.values()))
        self.progress.say(f"evaluation {name} after {units.plural(done, 'step')}: {told} ({named.rows} rows)")

    def _scores(self) -> Scores:
        name = self.checkpoints.policy.best
        known = self.evaluated.evaluations, self.evaluated.evaluated
        return scores(self.plan.graph, name, self.folder.metrics, *known)
