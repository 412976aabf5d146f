"""The checkpoints of a run, in ``checkpoints/`` of its folder: when one is due, complete, or out of use.

Workers write their parts into a hidden folder, each when it comes to it. When all have, the controller writes
the manifest and gives the folder its name; so a folder with a name is complete, however the run ended.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hflow import units
from hflow.diagnostics import HflowError
from hflow.graph.run_config import CheckpointPolicy
from hflow.plan.plan import Plan, graph_hash
from hflow.runtime.checkpoint.manifest import (
    FORMAT,
    NAME,
    Manifest,
    Piece,
    StoredDType,
    StoredState,
    damaged,
    name_of,
    read_manifest,
    to_json,
)
from hflow.runtime.checkpoint.written import WrittenPart
from hflow.runtime.controller.best_checkpoint import Scores, may_be_best
from hflow.runtime.controller.worker_failure import WorkerReport
from hflow.version import __version__

FOLDER = "checkpoints"
COMPLETE = re.compile(r"step-(\d+)")
MOST_FAILURES = 3  # in a row


@dataclass
class _Pending:
    """A checkpoint that workers are writing. `problem`: why its folder could not be made; `stall_s`: for how
    long the slowest worker did nothing else."""

    folder: Path
    problem: str = ""
    parts: list[WrittenPart] = field(default_factory=list[WrittenPart])
    stall_s: float = 0.0


class Checkpoints:
    """Those of one run.

    Args:
        folder: of the run.
        workers: how many write.
        event: records what happened.
        say: tells it to the user.
        first: the step that the run goes on from. Checkpoints of later ones are of no use: they were passed
            over, and their steps are made again.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        policy: CheckpointPolicy,
        workers: int,
        event: Callable[..., None],
        say: Callable[[str], None],
        first: int = 0,
    ):
        self.folder, self.plan, self.policy, self.workers = folder / FOLDER, plan, policy, workers
        self._event, self._say = event, say
        self._pending: dict[int, _Pending] = {}
        self._failed = 0
        self._last_s = time.monotonic()
        self._newest = first

    def is_due(self, done: int) -> bool:
        """Whether one is to be written after `done` steps: the last ones too, so that more steps can follow
        them."""
        every, seconds = self.policy.every, self.policy.seconds
        by_number = every and done % every == 0
        by_time = seconds and time.monotonic() - self._last_s >= seconds
        at_end = (every or seconds) and done == self.plan.graph.steps
        return bool(by_number or by_time or at_end) and self._is_new(done)

    def is_owed(self, done: int) -> bool:
        """Whether an interrupted run has steps that no checkpoint has."""
        return self.policy.on_signal and done > 0 and self._is_new(done)

    def begin(self, done: int) -> tuple[str, int, str]:
        """The call that has workers write one."""
        folder = self.folder / f".step-{done:08d}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        self._last_s = time.monotonic()
        pending = self._pending[done] = _Pending(folder)
        try:
            folder.mkdir(parents=True)
        except OSError as error:  # workers say so, too
            pending.problem = f"{folder}: {error.strerror}"
        return "checkpoint", done, str(folder.absolute())

    def add(self, reports: Sequence[WorkerReport], scores: Callable[[], Scores]) -> None:
        """Take in what workers have written, and complete the checkpoints that are.

        Args:
            scores: gives those by which the best is kept.

        Raises:
            HflowError: HF412 when several in a row could not be written.
        """
        for report in reports:
            written: list[WrittenPart] = report.get("written", [])
            for part in written:
                self._pending[part.step].parts.append(part)
        for step in [s for s, p in self._pending.items() if len(p.parts) >= self.workers]:
            self._complete(step, self._pending.pop(step))
            self._remove_old(scores())

    def began(self, done: int, reports: Sequence[WorkerReport]) -> None:
        """All workers have copied their parts of the state after `done` steps."""
        self._pending[done].stall_s = max(report.get("stall_s", 0.0) for report in reports)

    def go_on_under(self, plan: Plan, workers: int) -> None:
        """Those that begin from now on are of `plan`; none is under way."""
        self.plan, self.workers = plan, workers

    def clear(self) -> None:
        """Remove what was not completed."""
        for pending in self._pending.values():
            shutil.rmtree(pending.folder, ignore_errors=True)
        self._pending.clear()

    def _is_new(self, done: int) -> bool:
        return done > self._newest and done not in self._pending

    def _complete(self, step: int, pending: _Pending) -> None:
        problem = pending.problem or next((part.error for part in pending.parts if part.error), "")
        try:
            if not problem:
                manifest = _manifest(self.plan, step, pending.parts)
                _commit(pending.folder, self.folder / name_of(step), manifest)
                self._newest, self._failed = step, 0
                write_s = max(part.write_s for part in pending.parts)
                figures = {"bytes": manifest.size_bytes, "stall_s": pending.stall_s, "write_s": write_s}
                self._event("checkpoint", step=step, **figures)
                return
        except OSError as error:
            problem = f"{pending.folder}: {error.strerror}"
        self._fail(step, pending, problem)

    def _fail(self, step: int, pending: _Pending, problem: str) -> None:
        shutil.rmtree(pending.folder, ignore_errors=True)
        self._failed += 1
        self._event("checkpoint_failed", step=step, problem=problem)
        self._say(f"the checkpoint of step {step} could not be written: {problem}")
        if self._failed == MOST_FAILURES:
            help_ = "make room, or write none: `--set run.checkpoint=false`; what was complete is kept"
            raise damaged(self.folder, f"{MOST_FAILURES} in a row could not be written: {problem}", help_)

    def _remove_old(self, scores: Scores) -> None:
        steps = sorted(step for step in complete(self.folder.parent) if step <= self._newest)
        kept = {*steps[-self.policy.keep :], *may_be_best(steps, self.policy, scores)}
        for step in (s for s in steps if s not in kept):
            folder = self.folder / name_of(step)
            (folder / NAME).unlink(missing_ok=True)  # first, so that no half of it counts
            shutil.rmtree(folder, ignore_errors=True)


def complete(run: Path) -> Iterator[int]:
    """The steps after which the complete checkpoints of the run in `run` were taken."""
    for folder in (run / FOLDER).glob("step-*"):
        found = COMPLETE.fullmatch(folder.name)
        if found and not folder.is_symlink() and (folder / NAME).is_file():
            yield int(found[1])


def newest_usable(run: Path, tell: Callable[[HflowError], None], before: float) -> Path | None:
    """The folder of the newest checkpoint whose files are there, of those `before` a step; `tell` hears of
    those passed over.

    Raises:
        HflowError: HF412 when there are checkpoints and none can be used. To begin anew is for the user to
            say.
    """
    steps = sorted((step for step in complete(run) if step < before), reverse=True)
    for step in steps:
        folder = run / FOLDER / name_of(step)
        try:
            read_manifest(folder)
        except HflowError as error:
            tell(error)
            continue
        return folder
    if steps:
        names = " ".join(f"{run}@{step}" for step in steps)
        help_ = f"`hflow runs rm {names}` removes them; without any, a run that has not finished begins anew"
        raise damaged(run / FOLDER, f"none of {units.plural(len(steps), 'checkpoint')} is whole", help_)
    return None


def _manifest(plan: Plan, step: int, parts: Sequence[WrittenPart]) -> Manifest:
    states: dict[str, tuple[StoredDType, tuple[int, ...], list[Piece]]] = {}
    for part in parts:
        for piece in part.pieces:
            _, _, pieces = states.setdefault(piece.name, (piece.dtype, piece.shape, []))
            pieces.append(Piece(part.name, piece.key, piece.box))
    return Manifest(
        format=FORMAT,
        hflow=__version__,
        time=time.time(),
        step=step,
        graph=plan.graph.name,
        graph_hash=graph_hash(plan.graph),
        plan_hash=plan.hash,
        files={part.name: part.file for part in parts if part.file},
        tensors={
            name: StoredState(dtype, shape, tuple(found)) for name, (dtype, shape, found) in states.items()
        },
    )


def _commit(work: Path, folder: Path, manifest: Manifest) -> None:
    """Raises OSError when that is not possible; then there is no checkpoint."""
    with (work / NAME).open("x") as file:
        file.write(to_json(manifest))
        file.flush()
        os.fsync(file.fileno())
    _sync(work)
    shutil.rmtree(folder, ignore_errors=True)  # a damaged one that was passed over
    work.rename(folder)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    """So that the names in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
