"""Removing run folders and checkpoints: nothing else, nothing through a link, and no run that goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.report.run_status import SUMMARY, read_summary, run_status
from hflow.report.runs import MANIFEST, MARKS, checkpoint_folders, is_run, size_on_disk
from hflow.report.runs_text import printable


@dataclass(frozen=True)
class Removable:
    """A folder of a run, or of a checkpoint, that may be removed."""

    path: Path
    size_bytes: int
    is_checkpoint: bool


def find_removable(names: Sequence[str], folder: Path, force: bool = False) -> list[Removable]:
    """What `names` stand for: names of runs in `folder`, or paths; with ``@STEP`` one of its checkpoints.

    Args:
        force: also of a run that goes on, or of which that cannot be known.

    Raises:
        HflowError: HF407 for every name that may not be removed. Nothing has been removed then.
    """
    found: dict[Path, Removable] = {}
    problems: list[Diagnostic] = []
    for name in names:
        run, step = _named(name, folder)
        if problem := _problem(run, folder, force):
            problems.append(problem)
            continue
        paths = [run] if step is None else [path for at, path in checkpoint_folders(run) if at == step]
        if not paths:
            problems.append(_no_checkpoint(run, step))
        for path in paths:
            found[path] = Removable(path, size_on_disk(path), step is not None)
    if problems:
        raise HflowError(problems)
    return [r for path, r in found.items() if not any(parent in found for parent in path.parents)]


def remove(target: Removable) -> None:
    """Remove a folder and all in it. When that is cut short, a run is still one, of the same status, and can
    be removed again; a checkpoint is none any more.

    Raises:
        HflowError: HF407 when something cannot be removed.
    """
    try:
        if target.is_checkpoint:
            (target.path / MANIFEST).unlink(missing_ok=True)
        else:
            _remove_all_but(target.path, (*MARKS, SUMMARY))
        shutil.rmtree(target.path)
    except OSError as error:
        what = printable(str(error.filename or target.path))
        message = f"cannot remove `{what}`: {error.strerror or error}"
        raise HflowError(Diagnostic("HF407", message)) from None


def _remove_all_but(folder: Path, kept: Iterable[str]) -> None:
    with os.scandir(folder) as entries:
        others = [entry for entry in entries if entry.name not in kept]
    for entry in others:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()


def _named(name: str, folder: Path) -> tuple[Path, int | None]:
    """The folder of a run, and the step of a checkpoint."""
    start, at, step = name.rpartition("@")
    is_checkpoint = bool(at) and step.isascii() and step.isdecimal() and not any(_places(name, folder))
    wanted = start if is_checkpoint else name
    path = next(_places(wanted, folder), folder / wanted)
    return _absolute(path), int(step) if is_checkpoint else None


def _absolute(path: Path) -> Path:
    """Where a path leads, but that a link at its end is not followed."""
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def _places(name: str, folder: Path) -> Iterator[Path]:
    """Where something of that name is: in `folder`, or at that path."""
    yield from (path for path in (folder / name, Path(name)) if os.path.lexists(path))


def _problem(run: Path, folder: Path, force: bool) -> Diagnostic | None:
    """Why nothing of a run may be removed."""
    shown = printable(str(run))
    if not is_run(run):
        help_ = did_you_mean(printable(run.name), _known(folder), "runs")
        return Diagnostic("HF407", f"`{shown}` is no run folder", help=help_)
    if run.is_symlink():
        return Diagnostic("HF407", f"`{shown}` is a link", help="name the folder that it leads to")
    summary = read_summary(run)
    status = run_status(run, summary)
    if force or status not in ("running", "unreadable"):
        return None
    where = f" (process {summary.pid} on {summary.host})" if summary and summary.pid else ""
    said = f"is running{where}" if status == "running" else "has no summary that says whether it is running"
    return Diagnostic("HF407", f"`{shown}` {printable(said)}", help="end it first, or pass --force")


def _known(folder: Path) -> list[str]:
    try:
        return [printable(path.name) for path in folder.iterdir() if is_run(path)]
    except OSError:  # a help that is not there
        return []


def _no_checkpoint(run: Path, step: int | None) -> Diagnostic:
    known = ", ".join(str(at) for at, _ in sorted(checkpoint_folders(run)))
    help_ = f"its checkpoints: {known}" if known else "it has none"
    return Diagnostic("HF407", f"`{printable(str(run))}` has no checkpoint of step {step}", help=help_)
