"""What `hflow exec --resume RUN` goes on with: the run's own plan, or another of a graph that may go on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hflow.cli.arguments import load_run, print_diagnostics
from hflow.cli.run_commands import RUNS
from hflow.diagnostics import Diagnostic, HflowError

GRAPH, PLAN = "graph.yaml", "plan.json"


def named(run: Path) -> Path:
    """The folder of a run that is named by it, or by its name in ``runs/``."""
    return run if run.exists() or not (RUNS / run / PLAN).is_file() else RUNS / run


def former_plan(run: Path) -> Any:
    """The plan that the run had last.

    Raises:
        HflowError: HF407 when there is no run, HF306 when its plan cannot be read.
    """
    from hflow.plan.plan_file import load_plan

    if not (run / PLAN).is_file():
        help_ = "`hflow runs` lists runs"
        raise HflowError(Diagnostic("HF407", f"there is no run in `{run}`", help=help_))
    return load_plan(run / PLAN)


def former_config(
    run: Path, graph: Any, files: Sequence[Path], overrides: Sequence[str]
) -> tuple[Any, Sequence[Path], Sequence[str]]:
    """How the run was kept, with what `files` and `overrides` change of that; and those of them that are
    about the graph."""
    from hflow.graph.run_config import DEFAULT_RUN
    from hflow.graph.run_file import FILE, only_of_run, overridden, read_run_config

    file = run / FILE
    config = read_run_config(file) if file.exists() else DEFAULT_RUN
    of_run = [o for o in overrides if only_of_run([o], ())]
    run_files = [f for f in files if only_of_run((), [f])]
    config, warnings = overridden(config, graph, of_run, run_files, str(file))
    print_diagnostics(warnings)
    return config, [f for f in files if f not in run_files], [o for o in overrides if o not in of_run]


def graph_to_resume(
    run: Path,
    former: Any,
    given: Path | None,
    files: Sequence[Path],
    overrides: Sequence[str],
    allowed: Sequence[str],
) -> Any:
    """The run's graph with `overrides`, or a `given` one; what differs is printed.

    Raises:
        HflowError: HF411 for differences that were not allowed; as `hflow.graph.load.load`.
    """
    from hflow.graph.changes import check_changes

    if given:
        graph = _as_begun(former, load_run(given, files, overrides)[0])
    else:
        graph = own_graph(run, former, files, overrides)
    for change in check_changes(former, graph, allowed):
        print(f"{change.key}: {change.before} -> {change.after}; {change.meaning}", file=sys.stderr)
    return graph


def _as_begun(former: Any, graph: Any) -> Any:
    """`graph`, in which what it does not say is as the run began: dates, and dtypes."""
    from hflow.plan.chat_dates import keep_dates
    from hflow.plan.dtypes import keep_dtypes

    return keep_dtypes(former, keep_dates(former, graph))


def own_graph(run: Path, former: Any, files: Sequence[Path], overrides: Sequence[str]) -> Any:
    """The graph of a run's folder, changed; what it does not say is as the run began. Functions named by file
    are looked up beside the file that named them."""
    from hflow.bounded_read import UnreadableError, read_text
    from hflow.graph.load import checked
    from hflow.graph.source.document import MAX_BYTES, parse

    try:
        text = read_text(run / GRAPH, MAX_BYTES)
    except UnreadableError as error:
        raise HflowError(Diagnostic("HF407", f"`{run / GRAPH}` cannot be read: {error}")) from None
    place = next((node.span.file for node in former.nodes if node.span), str(run / GRAPH))
    found = checked(parse(text, place), tuple(overrides), tuple(files))
    print_diagnostics(found.warnings)
    return _as_begun(former, found.graph)
