"""The files that a plan was compiled with, as `hflow explain` tells of them: functions and model folders."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hflow.plan.digests import (
    FunctionFile,
    changed_chats,
    changed_models,
    chat_files,
    function_files,
    model_files,
)
from hflow.plan.plan import Plan
from hflow.view.terminal.table import Column, table
from hflow.view.terminal.terminal import labelled

DIGITS = 12  # of a digest, in the table
COLUMNS: tuple[Column, ...] = (
    ("function", "left"),
    ("nodes", "left"),
    ("file digest", "right"),
    ("", "left"),
)
_STATES = {"same": "", "changed": "changed since", "gone": "cannot be read", "unknown": "not compared"}


def files_text(plan: Plan, width: int = 100) -> str:
    """A table of the functions that the plan runs, and a line for every model folder, chat template or file
    of tools that has changed; empty if there is neither."""
    changed = (*changed_models(plan.graph, plan.digests), *changed_chats(plan.graph, plan.digests))
    functions = function_files(plan.graph, plan.digests)
    parts = [
        table(COLUMNS, [_row(f) for f in functions], width) if functions else "",
        labelled([("changed", d.message) for d in changed], width),
    ]
    return "\n\n".join(part for part in parts if part)


def _row(found: FunctionFile) -> tuple[str, ...]:
    digest = (found.digest or "-")[:DIGITS]
    return found.reference, " ".join(found.nodes), digest, _STATES[found.state]


def files_json(plan: Plan) -> dict[str, Any]:
    """`functions`, `model_files` and `chat_files`, with the digests that the plan holds. `state`: ``same``,
    ``changed``, ``gone``, or ``unknown`` where there is nothing to compare."""
    return {
        "functions": [_function(f) for f in function_files(plan.graph, plan.digests)],
        "model_files": [asdict(f) for f in model_files(plan.digests)],
        "chat_files": [asdict(f) for f in chat_files(plan.graph, plan.digests)],
    }


def _function(found: FunctionFile) -> dict[str, Any]:
    return {
        "function": found.reference,
        "nodes": list(found.nodes),
        "file": _shown(found.file),
        "digest": found.digest,
        "state": found.state,
    }


def _shown(file: Path | None) -> str | None:
    """A path under the working folder is shown relative to it."""
    if file is None:
        return None
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
