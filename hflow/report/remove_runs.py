"""Removing run folders and checkpoints: nothing else, nothing through a link, and no run that goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError
from hflow.report.named_run import named_run, no_checkpoint, no_run
from hflow.report.run_status import SUMMARY, read_summary, run_status
from hflow.report.runs import MANIFEST, MARKS, checkpoint_folders, is_run, size_on_disk
from hflow.units import printable


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
        run, checkpoint = named_run(name, folder)
        step = int(checkpoint) if checkpoint else None
        if problem := _problem(run, folder, force):
            problems.append(problem)
            continue
        paths = [run] if step is None else [path for at, path in checkpoint_folders(run) if at == step]
        if not paths:
            problems.append(no_checkpoint(run, f"of step {step}"))
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


def _problem(run: Path, folder: Path, force: bool) -> Diagnostic | None:
    """Why nothing of a run may be removed."""
    shown = printable(str(run))
    if not is_run(run):
        return no_run(run, folder)
    if run.is_symlink():
        return Diagnostic("HF407", f"`{shown}` is a link", help="name the folder that it leads to")
    summary = read_summary(run)
    status = run_status(run, summary)
    if force or status not in ("running", "unreadable"):
        return None
    where = f" (process {summary.pid} on {summary.host})" if summary and summary.pid else ""
    said = f"is running{where}" if status == "running" else "has no summary that says whether it is running"
    return Diagnostic("HF407", f"`{shown}` {printable(said)}", help="end it first, or pass --force")
