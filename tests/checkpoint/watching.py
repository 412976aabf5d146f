"""What a process opens and runs, as Python and as the kernel see it."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IN_OPEN = 0x20
RUNS = ("exec", "compile", "import", "marshal.loads", "pickle.find_class", "os.system", "os.exec",
        "os.posix_spawn", "subprocess.Popen", "os.fork")  # fmt: skip

_told: list[tuple[str, str]] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _told is not None and (event == "open" or event in RUNS):
        _told.append((event, os.fsdecode(arguments[0]) if event == "open" else str(arguments[:1])))


_hooks: list[int] = []


@contextmanager
def audited() -> Iterator[list[tuple[str, str]]]:
    """Every file that Python opens within, and all that it runs; a hook of audits can only be added."""
    global _told
    if not _hooks:
        sys.addaudithook(_hook)
        _hooks.append(1)
    _told = told = []
    try:
        yield told
    finally:
        _told = None


@contextmanager
def opened_in(folder: Path) -> Iterator[list[str]]:
    """Names in `folder` that anybody opens within, libraries included; known when the block has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert libc.inotify_add_watch(descriptor, os.fsencode(folder), IN_OPEN) > 0
    names: list[str] = []
    try:
        yield names
        with open(descriptor, "rb", buffering=0, closefd=False) as events:
            content = events.read(2**16) or b""
        while content:
            _, _, _, size = struct.unpack_from("iIII", content)
            names.append(content[16 : 16 + size].rstrip(b"\0").decode())
            content = content[16 + size :]
    finally:
        os.close(descriptor)
