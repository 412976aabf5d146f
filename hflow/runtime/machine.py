"""What identifies the machine that a process runs on."""

from __future__ import annotations

import os
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of a running machine, the same in all its containers


def machine() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else os.uname().nodename
