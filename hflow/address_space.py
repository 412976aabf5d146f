"""A limit on the address space (`ulimit -v`) under which torch and Ray end without a word: asked for first.

They map their libraries and their stores when they start, and where that fails they abort, crash, or wait
for processes that have crashed.
"""

from __future__ import annotations

import resource

from hflow.diagnostics import Diagnostic, HflowError

TORCH_BYTES = 1_800_000_000  # of a process with torch and a tiny model; measured
RAY_BYTES = 2_500_000_000  # of every process of a run on Ray; measured on two cores

RUN_ON_RAY = RAY_BYTES, "a run on Ray"
RUN_INLINE = TORCH_BYTES, "a run"


def require_address_space(needed: int, what: str) -> None:
    """Raises HflowError HF404 where this process may map fewer than `needed` bytes. `what` needs them."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return
    message = f"{what} needs {needed / 1e9:g} GB of address space, and {allowed / 1e9:.3g} GB are allowed"
    raise HflowError(Diagnostic("HF404", message, help="`ulimit -v unlimited` in this shell lifts the limit"))
