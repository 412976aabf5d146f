"""The commands that list runs, remove them, and take models out of them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from hflow.address_space import TORCH_BYTES, require_address_space
from hflow.diagnostics import Diagnostic, HflowError

RUNS = Path("runs")
RunsFolder = Annotated[
    Path | None, typer.Option("--dir", help="The folder of the runs; default: runs.", show_default=False)
]
app = typer.Typer(help="List the runs in a folder, or remove some.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def runs_command(
    context: typer.Context,
    folder: RunsFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the runs in a folder, or remove some."""
    context.obj = folder
    if context.invoked_subcommand is None:
        _list(folder, as_json)
    elif as_json:
        raise typer.BadParameter("--json is for the list")


@app.command("rm")
def rm_command(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(help="Runs, by name or folder; NAME@STEP: one checkpoint.", show_default=False),
    ],
    folder: RunsFolder = None,
    force: Annotated[bool, typer.Option("--force", help="Also what is still running.")] = False,
) -> None:
    """Remove run folders, or single checkpoints. Nothing is removed if one of the names is refused."""
    from hflow import units
    from hflow.report.remove_runs import find_removable, remove
    from hflow.units import printable

    found = find_removable(names, folder or context.obj or RUNS, force)
    for target in found:
        remove(target)
        print(f"removed  {printable(str(target.path))}  {units.size(target.size_bytes)}", flush=True)
    if len(found) > 1:
        print(f"freed    {units.size(sum(target.size_bytes for target in found))}")


def export_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="A run, by name or folder; @STEP or @best: that checkpoint; default: the newest.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="A trained model; default: all of them.", show_default=False)
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="A new folder; default: RUN/export/MODEL-step-N.", show_default=False
        ),
    ] = None,
    folder: RunsFolder = None,
) -> None:
    """Write trained models as they were at a checkpoint, as Hugging Face folders. Starts no worker."""
    require_address_space(TORCH_BYTES, "export")
    from hflow import units
    from hflow.report.export_run import export_run
    from hflow.units import printable

    for done in export_run(run, folder or RUNS, model, to, lambda text: print(text, file=sys.stderr)):
        after = units.plural(done.step, "step")
        where, size = printable(str(done.folder)), units.size(done.size_bytes)
        print(f"exported  {done.model} after {after}  {where}  {size}")


def _list(given: Path | None, as_json: bool) -> None:
    from hflow.report.runs import list_runs
    from hflow.report.runs_text import runs_json, runs_text
    from hflow.units import printable

    folder, nothing_yet = given or RUNS, given is None and not RUNS.exists()
    shown = printable(str(folder))
    try:
        runs = [] if nothing_yet else list_runs(folder)
    except OSError as error:
        raise HflowError(Diagnostic("HF407", f"cannot list `{shown}`: {error.strerror}")) from None
    if as_json:
        print(runs_json(runs))
    else:
        print(runs_text(runs, time.time()) if runs else f"no runs in `{shown}`")
