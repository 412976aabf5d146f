"""Files that are written whole or not at all, and what is told when they cannot be."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError

# The disk is full; so is the user's share of it; the limit of a file's size is reached.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, content: str | bytes, code: str = "HF001") -> None:
    """Write a file so that nobody ever reads a part of it, and its former content stays if that fails or is
    interrupted. Its folder is made. A link's target is replaced, and a device or pipe is written to.

    Raises:
        HflowError: `code` when it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise unwritten(path, error, code) from None


def check_writable(path: Path, code: str = "HF001") -> None:
    """Before work whose result goes there. A file that is there stays as it is, and none is made.

    Raises:
        HflowError: `code` when `write_whole` could not write it now.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_file() or not path.exists():  # a pipe's reader would take an opening for all that comes
            tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent).close()
    except OSError as error:
        raise unwritten(path, error, code) from None


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        if path.exists():
            part.chmod(path.stat().st_mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def unwritten(path: Path, error: OSError, code: str = "HF001") -> HflowError:
    """The diagnostic; on a full disk it tells what is free there."""
    reason, help_ = error.strerror or str(error), ""
    if error.errno in FULL:
        reason += _free(path)
        help_ = "make room there, or write to another place"
    return HflowError(Diagnostic(code, f"cannot write `{path}`: {reason}", help=help_))


def _free(path: Path) -> str:
    """`` (0.3 MB free)`` where the path lies, or would."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    with suppress(OSError):
        return f" ({shutil.disk_usage(there).free / 1e6:,.1f} MB free)"
    return ""
