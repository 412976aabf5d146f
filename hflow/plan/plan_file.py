"""Plan files: read, and held against everything that a plan may contradict."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from hflow.bounded_read import UnreadableError, parse_json, read_json, read_text
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.plan import VERSION, Plan
from hflow.plan.verify.consistency import inconsistencies
from hflow.plan.verify.graph_consistency import broken_graph
from hflow.plan.verify.placement_consistency import misplaced
from hflow.plan.verify.plan_numbers import bad_numbers

MAX_PLAN_BYTES = 2**26


def load_plan(path: Path) -> Plan:
    """Read a plan written by `Plan.save`.

    Raises:
        HflowError: HF001 when the file cannot be read, HF306 when it is no plan, contradicts itself, or is of
            another version.
    """
    try:
        text = read_text(path, MAX_PLAN_BYTES)
        found = parse_json(text, allow_nan=False)
    except UnreadableError as error:
        if error.reason != "json":
            raise HflowError(Diagnostic("HF001", f"cannot read `{path}`: {error}")) from None
        raise HflowError(_no_plan(path, f": {error}")) from None
    if not isinstance(found, dict):
        raise HflowError(_no_plan(path))
    version = cast("dict[str, Any]", found).get("version")
    if version != VERSION:
        message = f"`{path}` has plan version {version}; this hflow reads version {VERSION}"
        raise HflowError(Diagnostic("HF306", message, help="compile the graph again"))
    try:
        plan = TypeAdapter(Plan).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = f"`{path}`: {where}: {first['msg']}"
        raise HflowError(Diagnostic("HF306", message, help="compile the graph again")) from None
    graphs = (problem for program in plan.programs for problem in broken_graph(program.graph))
    problem = next(chain(bad_numbers(plan), graphs, misplaced(plan), inconsistencies(plan)), None)
    if problem:
        message = f"`{path}` contradicts itself: {problem}"
        raise HflowError(Diagnostic("HF306", message, help="compile the graph again"))
    return plan


def _no_plan(path: Path, why: str = "") -> Diagnostic:
    help_ = "`hflow compile GRAPH -o plan.json` writes one"
    return Diagnostic("HF306", f"`{path}` is no plan{why}", help=help_)


def is_plan(path: Path) -> bool:
    """Whether a file holds a plan, of whatever version."""
    try:
        found = read_json(path, MAX_PLAN_BYTES)
    except UnreadableError:
        return False
    return isinstance(found, dict) and {"version", "cluster", "step"} <= found.keys()
