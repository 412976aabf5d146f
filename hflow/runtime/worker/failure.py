"""Why a worker gave up, as data: an exception would lose its cause on the way through Ray."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hflow.diagnostics import Diagnostic, HflowError, Span
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.worker.world import Aborted


@dataclass(frozen=True)
class Failure:
    """`node` ran when it happened; `trace` is the traceback for the run's log; `aborted` tells that the
    worker only did as it was told when another failed. `time`: seconds since the epoch."""

    diagnostic: Diagnostic
    node: str = ""
    trace: str = ""
    aborted: bool = False
    time: float = field(default_factory=time.time)


def failure_of(error: BaseException, running: str, span_of: Callable[[str], Span | None]) -> Failure:
    """Describe an exception that ended the node `running`; `span_of` gives a node's place in the graph file,
    for errors that know no better one."""
    node = error.node if isinstance(error, NodeError) else running
    diagnostic = _diagnostic(error)
    placed = replace(diagnostic, span=diagnostic.span or span_of(node))
    return Failure(placed, node, _trace(error), isinstance(error, Aborted))


def _diagnostic(error: BaseException) -> Diagnostic:
    cause = error.__cause__ if isinstance(error, NodeError) else error
    if isinstance(cause, HflowError):
        return cause.diagnostics[0]
    if isinstance(error, NodeError):
        return Diagnostic(error.code, error.message)
    return Diagnostic("HF401", f"{type(error).__name__}: {error}")


def _trace(error: BaseException) -> str:
    """What helps to find the place in somebody's Python: not where hflow itself refused something."""
    if isinstance(error, HflowError):
        return ""
    if isinstance(error, NodeError) and error.trace:
        return error.trace
    shown = error.__cause__ if isinstance(error, NodeError) else error
    return "".join(traceback.format_exception(shown)) if shown else ""
