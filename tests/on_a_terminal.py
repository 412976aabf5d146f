"""hflow with a terminal at its stderr, and all that it has shown there."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # what moves the cursor or colours


def on_a_terminal(*arguments: str) -> tuple[str, list[str]]:
    """What a command that must succeed prints, and the lines that the terminal has shown."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hflow.cli.app", *arguments]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # how Linux says that nobody has the other end any more
            while chunk := os.read(ours, 65536):
                shown += chunk
        os.close(ours)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, shown
    return printed, [line.strip() for line in re.split(r"[\r\n]+", SEQUENCE.sub("", shown.decode()))]
