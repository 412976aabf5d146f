"""Model folders that are written whole or not at all."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hflow.diagnostics import Diagnostic, HflowError
from hflow.whole_file import FULL, unwritten


@contextmanager
def whole_folder(folder: Path, keeps_others: bool = False) -> Iterator[Path]:
    """A new folder to fill. When the block has ended it takes the place of `folder`, or if `keeps_others` its
    files go there beside others; when the block is left by an exception, it goes.

    Raises:
        HflowError: HF406 when something cannot be written, also by safetensors within the block.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        is_kept = keeps_others and folder.exists()
        place = folder if is_kept else folder.parent
        with tempfile.TemporaryDirectory(prefix=_prefix(folder), dir=place) as work:
            new = Path(work) / "new"
            new.mkdir()
            yield new
            if is_kept:
                _move_files(new, folder)
                return
            if folder.exists():
                folder.rename(Path(work) / "old")
            new.rename(folder)
    except (SafetensorError, OSError) as error:
        raise _unwritten(folder, error) from error


def remove_unfinished(folder: Path) -> None:
    """Remove what a `whole_folder` has left whose process was killed."""
    for left in folder.parent.glob(f"{_prefix(folder)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _prefix(folder: Path) -> str:
    return f".{folder.name}-"


def _move_files(source: Path, target: Path) -> None:
    for file in source.iterdir():
        file.replace(target / file.name)


def _unwritten(folder: Path, error: SafetensorError | OSError) -> HflowError:
    """safetensors says ``I/O error: No space left on device (os error 28)``."""
    found = re.search(r"([^:]*) \(os error (\d+)\)", str(error))
    cause = OSError(int(found[2]), found[1].strip()) if found else error
    if isinstance(cause, OSError) and cause.errno in FULL:
        return unwritten(folder, cause, "HF406")
    return HflowError(Diagnostic("HF406", f"model folder `{folder}` cannot be written: {error}"))
