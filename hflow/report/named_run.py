"""What people call a run, or one of its checkpoints: ``grpo-20260102-030405@200``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from hflow.diagnostics import Diagnostic, did_you_mean
from hflow.report.runs import checkpoint_folders, is_run
from hflow.units import printable

MAX_DIGITS = 18  # of a number of steps


def named_run(name: str, folder: Path, words: Collection[str] = ()) -> tuple[Path, str]:
    """The folder of a run, named as in `folder` or by path, and what stands after an ``@``: a number of
    steps, or one of `words`; nothing where the whole run is meant. Whether they are there is not asked."""
    start, _, checkpoint = name.rpartition("@")
    is_step = checkpoint.isascii() and checkpoint.isdecimal() and len(checkpoint) <= MAX_DIGITS
    if start and (is_step or checkpoint in words) and not any(_places(name, folder)):
        return _found(start, folder), checkpoint
    return _found(name, folder), ""


def no_run(run: Path, folder: Path) -> Diagnostic:
    """`run` is the folder of none; `folder` has others."""
    help_ = did_you_mean(printable(run.name), _known(folder), "runs")
    return Diagnostic("HF407", f"`{printable(str(run))}` is no run folder", help=help_)


def no_checkpoint(run: Path, which: str = "") -> Diagnostic:
    """A run has none, or none that is `which`."""
    known = ", ".join(str(at) for at, _ in sorted(checkpoint_folders(run)))
    help_ = f"its checkpoints: {known}" if known else "it has none"
    wanted = f"no checkpoint {which}".rstrip()
    return Diagnostic("HF407", f"`{printable(str(run))}` has {wanted}", help=help_ if which else "")


def _found(name: str, folder: Path) -> Path:
    return _absolute(next(_places(name, folder), folder / name))


def _absolute(path: Path) -> Path:
    """Where a path leads, but that a link at its end is not followed."""
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def _places(name: str, folder: Path) -> Iterator[Path]:
    """Where something of that name is: in `folder`, or at that path."""
    yield from (path for path in (folder / name, Path(name)) if os.path.lexists(path))


def _known(folder: Path) -> list[str]:
    try:
        return [printable(path.name) for path in folder.iterdir() if is_run(path)]
    except OSError:  # a help that is not there
        return []
