"""The command that shows what a graph file comes to, or gets one back out of a picture or a model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hflow.address_space import TORCH_BYTES, require_address_space
from hflow.cli.arguments import Files, Overrides, load_graph, refuse_plan, write_text
from hflow.diagnostics import Diagnostic, HflowError


def show_command(
    graph: Annotated[
        Path | None,
        typer.Argument(help="A graph file, or the name of an algorithm: grpo.", show_default=False),
    ] = None,
    file: Files = None,
    set_: Overrides = None,
    resolved: Annotated[
        bool,
        typer.Option(
            "--resolved/--ir",
            help="The graph file after extends, -f, --set and expressions, each value with its origin; or the"
            " graph with every type inferred.",
        ),
    ] = False,
    python: Annotated[
        bool, typer.Option("--python", help="The Python that builds the same graph, instead.")
    ] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the graph into this file instead.")] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The first N rows of its data, as models read them, instead."),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Print the graph file that a picture, a page, an exported model or a run was made from.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="With --from: write graph.yaml, and plan.json, there."),
    ] = None,
) -> None:
    """Print what a graph file comes to, as text, or draw it."""
    if from_:
        if graph or file or set_ or resolved or python or svg or prompts:
            raise HflowError(Diagnostic("HF001", "--from goes with --to alone"))
        _give_back(from_, to)
        return
    if not graph or to:
        message = "--to goes with --from" if to else "say which graph: a file, or the name of an algorithm"
        raise HflowError(Diagnostic("HF001", message, help="`hflow show --help` lists the options"))
    refuse_plan(graph)
    if resolved and python:
        raise HflowError(Diagnostic("HF001", "--python prints a program, --resolved a file: one of them"))
    if resolved:  # before it is checked: it helps to find out what is wrong
        _print_resolved(graph, file, set_)
    checked = load_graph(graph, file, set_)
    if python:
        _print_python(graph, file, set_)
    _show(checked, svg, prompts, printed=resolved or python)


def _print_resolved(graph: Path, file: list[Path] | None, set_: list[str] | None) -> None:
    from hflow.graph.load import assembled, read_graph
    from hflow.graph.write.resolved import resolved

    print(resolved(assembled(read_graph(graph), set_ or (), file or ())), end="")


def _print_python(graph: Path, file: list[Path] | None, set_: list[str] | None) -> None:
    from hflow.graph.builder.python_printer import to_python
    from hflow.graph.load import assembled, read_graph

    print(to_python(assembled(read_graph(graph), set_ or (), file or ())), end="")


def _show(checked: Any, svg: Path | None, prompts: int | None, printed: bool) -> None:
    from hflow.graph.write import printer

    if prompts:
        _print_prompts(checked, prompts)
    if svg:
        _draw(checked, svg)
    elif not (printed or prompts):
        print(printer.ir(checked), end="")


def _print_prompts(graph: Any, count: int) -> None:
    require_address_space(TORCH_BYTES, "show --prompts")
    from hflow.runtime.tools.first_prompts import first_prompts

    for text in first_prompts(graph, count):
        print(text)


def _draw(graph: Any, path: Path) -> None:
    from hflow.plan.origin import Origin
    from hflow.view.picture.carried_origin import with_origin
    from hflow.view.picture.svg import graph_svg

    write_text(path, with_origin(graph_svg(graph), Origin(graph.text)) + "\n")
    print(f"drew {path}")


def _give_back(path: Path, to: Path | None) -> None:
    from hflow.report.read_origin import read_origin

    origin = read_origin(path)
    if to is None:
        print(_shown(origin.graph) if sys.stdout.isatty() else origin.graph, end="")
        if origin.plan:
            print("it has a plan, too: --to FOLDER writes both", file=sys.stderr)
        return
    texts = {to / "graph.yaml": origin.graph, to / "plan.json": origin.plan}
    if there := next((file for file in texts if os.path.lexists(file)), None):
        raise HflowError(Diagnostic("HF001", f"`{there}` is there already", help="--to another folder"))
    for file, text in texts.items():
        if text:
            write_text(file, text)
            print(f"wrote {file}")


def _shown(text: str) -> str:
    """Without signs that a terminal would obey: the file may be a stranger's."""
    from hflow.units import printable

    return "\n".join(map(printable, text.split("\n")))
