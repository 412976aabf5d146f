"""What several commands take, and how they read it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hflow.diagnostics import Diagnostic, HflowError, render, source_of
from hflow.whole_file import write_whole

GraphFile = Annotated[
    Path, typer.Argument(help="A graph file, or the name of an algorithm: grpo.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: params.steps=3.")
]
Files = Annotated[
    list[Path] | None,
    typer.Option("-f", "--file", metavar="FILE", help="Merge a partial graph file over the graph."),
]
ClusterFile = Annotated[
    str | None,
    typer.Option("--cluster", help="Cluster file, or the name of one in clusters/; default: local."),
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="NODE=tp2,dp2@0-3", help="Fix a node's parallel sizes and devices."),
]

EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="NODE=sglang",
        help="What a generate node runs on: megatron, sglang, transformers, or auto: one of the first two.",
    ),
]

DEFAULT_CLUSTER = "local"


def load_graph(
    path: Path, files: Sequence[Path] | None = None, overrides: Sequence[str] | None = None
) -> Any:
    """The graph; warnings are printed. Raises HflowError with all that is wrong."""
    return load_run(path, files, overrides)[0]


def load_run(
    path: Path, files: Sequence[Path] | None = None, overrides: Sequence[str] | None = None
) -> tuple[Any, Any]:
    """The graph, and how a run of it is kept (`hflow.graph.run_config.RunConfig`). Otherwise as
    `load_graph`."""
    found = load_checked(path, files, overrides)
    print_diagnostics(found.warnings)
    return found.graph, found.config


def load_checked(
    path: Path, files: Sequence[Path] | None = None, overrides: Sequence[str] | None = None
) -> Any:
    """As `load_run`, with the warnings, of which none is printed (`hflow.graph.load.checked`)."""
    from hflow.graph.load import checked, read_graph

    refuse_plan(path)
    return checked(read_graph(path), tuple(overrides or ()), tuple(files or ()))


def refuse_plan(path: Path) -> None:
    """HF306: a plan stands where a graph is asked for."""
    if path.suffix != ".json":
        return
    from hflow.plan.plan_file import is_plan

    if is_plan(path):
        help_ = f"`hflow explain {path}` prints it, `hflow exec {path}` runs it"
        raise HflowError(Diagnostic("HF306", f"`{path}` is a plan, not a graph", help=help_))


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all, and its folder. HF001 where that is not possible."""
    write_whole(path, text)


def width() -> int:
    """Columns to print in."""
    return max(100, shutil.get_terminal_size((100, 24)).columns)


def print_diagnostics(diagnostics: Iterable[Diagnostic]) -> None:
    for diagnostic in diagnostics:
        print(render(diagnostic, source_of(diagnostic)), end="\n\n", file=sys.stderr)
