"""Python's search for cyclic garbage, made seldom while a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

OBJECTS = 500_000  # that are new before the collector looks at them; it would at 700


@contextmanager
def gc_pause() -> Generator[None]:
    """Compiling makes very many small values that are in no cycle. To look through them again and again takes
    about a seventh of the time."""
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
