"""How commands read clusters and make plans, and what a terminal shows meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hflow.cli.arguments import DEFAULT_CLUSTER, print_diagnostics
from hflow.compiler.options import PlannerOptions


def read_cluster(name: str | None) -> Any:
    """The cluster; warnings are printed. Raises HflowError with all that is wrong."""
    from hflow.plan.cluster_file import check_cluster

    cluster, warnings = check_cluster(DEFAULT_CLUSTER if name is None else name)
    print_diagnostics(warnings)
    return cluster


def make_plan(
    graph: Any,
    cluster: Any,
    pins: Sequence[str] | None,
    options: PlannerOptions,
    after: Callable[[str, Any], None] | None = None,
) -> Any:
    """The plan. On a terminal, stderr shows that it is looked for; with ``exhaustive``, how far that is.

    Args:
        after: called with each pass and what it has made; it prints, so nothing else is shown.
    """
    from rich.console import Console

    from hflow.compiler.compile import compile_graph

    console = Console(stderr=True)
    if after:
        return compile_graph(graph, cluster, pins or (), options, after)
    if options.planner == "exhaustive" and console.is_terminal:
        with _counted(console) as on_priced:
            return compile_graph(graph, cluster, pins or (), replace(options, on_priced=on_priced))
    with console.status("looking for the best plan"):
        return compile_graph(graph, cluster, pins or (), options)


@contextmanager
def _counted(console: Any) -> Iterator[Callable[[int, int], None]]:
    """A line that says how many plans of how many have been priced; what is yielded is told that."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("plans priced"),
        MofNCompleteColumn(separator=" of "),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)  # until they are counted
        yield lambda priced, total: bar.update(task, completed=priced, total=total)
