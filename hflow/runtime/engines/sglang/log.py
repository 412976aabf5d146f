"""What a server's log says about its end."""

from __future__ import annotations

import re
from pathlib import Path

LAST_LINES = 15
RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+", re.MULTILINE)
KILLED = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed with exit code -\d+")


def cause(log: Path) -> str:
    """One line: the process that was killed, or the exception that ended the first traceback; or nothing."""
    text = log.read_text(errors="replace")
    found = KILLED.search(text) or RAISED.search(text)
    return found[0] if found else ""


def last_lines(log: Path) -> str:
    """Indented by two."""
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"  {line}" for line in lines)
