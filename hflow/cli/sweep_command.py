"""The command that compiles one graph for several clusters and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from hflow.cli.arguments import (
    DEFAULT_CLUSTER,
    EngineOptions,
    Files,
    GraphFile,
    Pins,
    print_diagnostics,
    refuse_plan,
    width,
    write_text,
)
from hflow.cli.planning import make_plan
from hflow.compiler.options import DEFAULTS, PlacementPolicy, Planner, PlannerOptions
from hflow.diagnostics import HflowError
from hflow.whole_file import check_writable


def sweep_command(
    graph: GraphFile,
    clusters: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Cluster files, or names of those in clusters/.")
    ] = DEFAULT_CLUSTER,
    pin: Pins = None,
    engine: EngineOptions = None,
    file: Files = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE,VALUE", help="Values of a key: params.batch=64,128."),
    ] = None,
    placement: Annotated[
        PlacementPolicy, typer.Option(help="As of compile; as is --planner.")
    ] = DEFAULTS.placement,
    planner: Annotated[Planner, typer.Option(help="What finds the plans.")] = DEFAULTS.planner,
    budget: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Of each combination.")
    ] = DEFAULTS.budget_s,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    to_csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the figures to this file, too.")
    ] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Print no sign outside ASCII.")] = False,
) -> None:
    """Compile a graph for every combination of clusters and values, and compare the plans in a table.

    The exit code is 1 if none fits.
    """
    from hflow.report.sweep import check_planned, settings_of
    from hflow.report.sweep_text import sweep_csv, sweep_json, sweep_text
    from hflow.view.terminal.terminal import as_ascii

    options = PlannerOptions(placement, planner, budget, tuple(engine or ()))
    refuse_plan(graph)
    settings = settings_of(set_ or ())
    graphs = _graphs(graph, file or (), settings)
    machines = _clusters(clusters.split(","))
    _check(graphs, machines, pin or (), options)
    if to_csv:
        check_writable(to_csv)
    rows = list(_rows(graphs, machines, settings, pin or (), options))
    some_fit = check_planned(rows)
    if as_json:
        print(sweep_json(graphs[0].name, rows))
    else:
        text = sweep_text(graphs[0].name, rows, width())
        print(as_ascii(text) if ascii_only else text)
    if to_csv:
        write_text(to_csv, sweep_csv(rows))
    if not some_fit:
        raise typer.Exit(1)


def _graphs(path: Path, files: Sequence[Path], settings: Sequence[Sequence[Any]]) -> list[Any]:
    """One for each combination of values; each warning is printed once."""
    from hflow.graph.load import checked, read_graph

    found = [checked(read_graph(path), [s.override for s in each], files) for each in settings]
    print_diagnostics(dict.fromkeys(warning for each in found for warning in each.warnings))
    return [each.graph for each in found]


def _clusters(names: Sequence[str]) -> dict[str, Any]:
    from hflow.plan.cluster_file import check_cluster

    found = {name.strip(): check_cluster(name.strip()) for name in names}
    print_diagnostics(dict.fromkeys(warning for _, warnings in found.values() for warning in warnings))
    return {name: cluster for name, (cluster, _) in found.items()}


def _check(
    graphs: Sequence[Any], machines: dict[str, Any], pins: Sequence[str], options: PlannerOptions
) -> None:
    """Before the first plan is made: raise what is wrong with a graph or a cluster, whatever fits."""
    from hflow.compiler.compile import new_draft
    from hflow.report.sweep import check_unplanned

    for machine, each in product(machines.values(), graphs):
        try:
            new_draft(each, machine, pins, options)
        except HflowError as error:
            check_unplanned(error)


def _rows(
    graphs: Sequence[Any],
    machines: dict[str, Any],
    settings: Sequence[tuple[Any, ...]],
    pins: Sequence[str],
    options: PlannerOptions,
) -> Iterator[Any]:
    """In the order given: clusters, then the values of each key. A terminal is told of each."""
    from rich.console import Console

    from hflow.report.sweep import no_plan, swept

    console, total = Console(stderr=True), len(machines) * len(graphs)
    combinations = ((name, *pair) for name in machines for pair in zip(settings, graphs))
    for number, (name, values, graph) in enumerate(combinations, 1):
        if console.is_terminal:
            text = "  ".join((name, *(setting.override for setting in values)))
            console.print(f"{number}/{total}  {text}", highlight=False, markup=False, soft_wrap=True)
        try:
            yield swept(make_plan(graph, machines[name], pins, options), name, values)
        except HflowError as error:
            yield no_plan(error, name, values)
