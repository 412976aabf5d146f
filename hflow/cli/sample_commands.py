"""The commands that show what a run does: its samples, and the run itself while it goes on."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from hflow.cli.run_commands import RUNS, RunsFolder
from hflow.diagnostics import HflowError

LOOK_S = 1.0
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run, by name or folder.", show_default=False)]


def samples_command(
    run: RunName,
    step: Annotated[
        int | None, typer.Option(min=0, help="Of this step; default: the newest.", show_default=False)
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help="The greatest first, as reward; -reward: the least first.")
    ] = "",
    grep: Annotated[str, typer.Option(metavar="TEXT", help="Only those with this text in them.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, texts whole.")] = False,
    folder: RunsFolder = None,
) -> None:
    """Show what a run has sampled, with rewards and whatever else was computed of it."""
    from rich.console import Console

    from hflow.report.samples.chosen import choose_samples
    from hflow.report.samples.text import print_samples, samples_json

    chosen = choose_samples(_found(run, folder), step, sort, grep, limit)
    if as_json:
        print(samples_json(chosen.rows))
        return
    columns = shutil.get_terminal_size((80, 24)).columns
    print_samples(chosen, Console(width=columns, highlight=False, markup=False, emoji=False))


def watch_command(
    run: RunName,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, and end.")] = False,
    folder: RunsFolder = None,
) -> None:
    """Watch a run, also that of another process: what it does now, its curves, how long it will take."""
    from rich.console import Console
    from rich.live import Live

    from hflow.report.watch.frame import frame
    from hflow.report.watch.watched_run import WatchedRun

    watched = WatchedRun(_found(run, folder))
    console = Console(width=shutil.get_terminal_size((80, 24)).columns, highlight=False)
    watched.look()
    if once:
        console.print(frame(watched, console.width))
        return
    with Live(frame(watched, console.width), console=console, auto_refresh=False) as live:
        while watched.status == "running":
            time.sleep(LOOK_S)
            watched.look()
            live.update(frame(watched, console.width), refresh=True)


def _found(name: str, folder: Path | None) -> Path:
    """The folder of a run. HF407 when there is none."""
    from hflow.report.named_run import named_run, no_run
    from hflow.report.runs import is_run

    runs = folder or RUNS
    run = named_run(name, runs)[0]
    if not is_run(run):
        raise HflowError(no_run(run, runs))
    return run
