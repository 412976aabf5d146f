"""Whether a folder is the one that another process sees, and can be written."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

APPEARS_S, LOOK_S = 5.0, 0.2  # network file systems show what others have made a moment later


def folder_problem(mark: Path) -> str:
    """What is wrong, after "it": empty where the file `mark` is there, and others can be made beside it."""
    deadline = time.monotonic() + APPEARS_S
    while not mark.exists():
        if time.monotonic() > deadline:
            return "is another folder" if mark.parent.is_dir() else "does not exist"
        time.sleep(LOOK_S)
    own = mark.with_name(f"{mark.name}-{secrets.token_hex(4)}")
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return ""
