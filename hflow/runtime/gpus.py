"""Keeping GPUs out of the sight of what runs plans for CPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}  # in the environment of a process: it sees no GPU


def hide_gpus() -> None:
    """From this process and those that it starts. Call it before torch is imported, which looks once."""
    os.environ |= HIDDEN


@contextmanager
def gpus_hidden() -> Iterator[None]:
    """From the processes that are started meanwhile; this one may need them later."""
    before = {name: os.environ.get(name) for name in HIDDEN}
    hide_gpus()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
