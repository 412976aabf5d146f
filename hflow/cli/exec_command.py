"""The command that runs a graph or a plan."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hflow.address_space import RUN_INLINE, RUN_ON_RAY, require_address_space
from hflow.cli.arguments import (
    ClusterFile,
    EngineOptions,
    Files,
    Overrides,
    Pins,
    load_run,
    print_diagnostics,
)
from hflow.cli.planning import make_plan, read_cluster
from hflow.cli.resume import former_config, former_plan, graph_to_resume, named
from hflow.compiler.options import PlannerOptions
from hflow.diagnostics import Diagnostic, HflowError


class Workers(StrEnum):
    ray = "ray"
    inline = "inline"


def exec_command(
    graph: Annotated[
        Path | None,
        typer.Argument(help="A graph, by file or name; a plan.json runs as it is.", show_default=False),
    ] = None,
    cluster: ClusterFile = None,
    pin: Pins = None,
    engine: EngineOptions = None,
    file: Files = None,
    set_: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder to fill; default runs/NAME-TIME.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster instead of starting one.")
    ] = None,
    workers: Annotated[Workers, typer.Option(help="inline: one worker in this process.")] = Workers.ray,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Go on with this run, by name or folder, from its newest checkpoint."
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="With --resume: let the graph differ in nodes.x.with.lr."),
    ] = None,
) -> None:
    """Run a graph (or a plan) to its end, and leave a run folder with metrics, report and trained models.

    How the run is kept is said in the section `run` of the graph, or by --set run.checkpoint.every=10. With
    --resume no graph is needed; --cluster, --pin, --engine and --set then make another plan of the run's own.
    """
    require_address_space(*(RUN_INLINE if workers is Workers.inline else RUN_ON_RAY))
    resume = named(resume) if resume else None
    if resume:
        plan, config = _resumed(resume, graph, cluster, pin, engine, file or (), set_ or (), allow or ())
    elif graph is None or allow:
        message = "there is no graph to run" if graph is None else "--allow is for --resume"
        help_ = "`hflow exec GRAPH`, or `hflow exec --resume RUN`"
        raise HflowError(Diagnostic("HF001", message, help=help_))
    elif graph.suffix == ".json":
        plan, config = _only_plan(graph, (cluster, pin, engine), file or (), set_ or ())
    else:
        options = PlannerOptions(engines=tuple(engine or ()))
        loaded, config = load_run(graph, file, set_)
        plan = make_plan(loaded, read_cluster(cluster), pin, options)
    from hflow.runtime.gpus import hide_gpus
    from hflow.runtime.openmp import sleep_soon

    if plan.cluster.device.platform == "cpu":
        hide_gpus()
    sleep_soon()
    from hflow.compiler.replan import replan, replan_for_lengths
    from hflow.report.run_views import RUN_VIEWS
    from hflow.runtime.execute import execute  # torch, too

    run = execute(
        plan,
        run_dir=resume or run_dir,
        address=address,
        workers=workers.value,
        views=RUN_VIEWS,
        config=config,
        resume=resume is not None,
        replan=replan,
        replan_for_lengths=replan_for_lengths,
    )
    print(f"run folder  {run.folder}")


def _resumed(
    run: Path,
    graph: Path | None,
    cluster: str | None,
    pins: Sequence[str] | None,
    engines: Sequence[str] | None,
    files: Sequence[Path],
    overrides: Sequence[str],
    allowed: Sequence[str],
) -> tuple[Any, Any]:
    """The plan to go on with, and how the run is kept: as before where nothing else is said."""
    former = former_plan(run)
    config, files, overrides = former_config(run, former.graph, files, overrides)
    if not any((graph, cluster, pins, engines, files, overrides, allowed)):
        return former, config
    changed = graph_to_resume(run, former.graph, graph, files, overrides, allowed)
    where = read_cluster(cluster) if cluster else former.cluster
    return make_plan(changed, where, pins, PlannerOptions(engines=tuple(engines or ()))), config


def _only_plan(
    path: Path, given: Sequence[Any], files: Sequence[Path], overrides: Sequence[str]
) -> tuple[Any, Any]:
    """The plan in a file, and how a run of it is kept: a plan does not say that."""
    from hflow.graph.run_config import DEFAULT_RUN
    from hflow.graph.run_file import only_of_run, overridden
    from hflow.plan.plan_file import load_plan

    if any(given) or not only_of_run(overrides, files):
        message = "--cluster, --pin, --engine, -f and --set are for graphs; a plan is executed as it is"
        help_ = (
            "compile the graph with them; with a plan, -f and --set change the section `run` alone:"
            " `--set run.checkpoint.every=10`"
        )
        raise HflowError(Diagnostic("HF306", message, help=help_))
    plan = load_plan(path)
    config, warnings = overridden(DEFAULT_RUN, plan.graph, overrides, files)
    print_diagnostics(warnings)
    return plan, config
