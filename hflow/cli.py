"""The command line. User errors are diagnostics and exit code 1; Ctrl-C is 130, SIGTERM 143."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hflow.diagnostics import Diagnostic, HflowError, Terminated, render

app = typer.Typer(
    name="hflow",
    help="Compile RLHF algorithms, declared as typed dataflow graphs, to parallel plans, and run them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

GraphFile = Annotated[
    Path, typer.Argument(help="A graph file, e.g. algorithms/grpo.yaml.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: params.steps=3.")
]
ClusterFile = Annotated[
    str | None,
    typer.Option("--cluster", help="Cluster file, or the name of one in clusters/; default: local."),
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="NODE=tp2,dp2@0-3", help="Fix a node's parallel sizes and devices."),
]


DEFAULT_CLUSTER = "local"


class Workers(StrEnum):
    ray = "ray"
    inline = "inline"


@app.command()
def check(graph: GraphFile, set_: Overrides = None) -> None:
    """Tell everything that is wrong with a graph file. Starts no process and needs no model."""
    from hflow.graph.load import check as check_file
    from hflow.view.units import plural

    checked, warnings = check_file(graph, tuple(set_ or ()))
    _print_diagnostics(warnings)
    edges = sum(1 for _ in checked.edges())
    counts = (
        plural(len(checked.nodes), "node"),
        plural(edges, "data edge"),
        plural(len(checked.models), "model"),
    )
    print(f"ok  {checked.name}: {', '.join(counts)}")


@app.command()
def show(graph: GraphFile, set_: Overrides = None) -> None:
    """Print a graph with every type inferred, as text."""
    from hflow.graph.printer import ir

    print(ir(_load(graph, set_)))


@app.command("compile")
def compile_command(
    graph: GraphFile,
    cluster: ClusterFile = None,
    pin: Pins = None,
    set_: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan's table as one JSON object.")
    ] = False,
) -> None:
    """Show who runs where, what moves, how long it takes and whether it fits. Needs no GPU."""
    from hflow.view.plan_json import plan_json
    from hflow.view.terminal import plan_text

    started = time.perf_counter()
    plan = _compile(graph, cluster, pin, set_)
    seconds = time.perf_counter() - started
    if output:
        plan.save(output)
    if as_json:
        print(json.dumps(plan_json(plan, seconds)))
        return
    print(plan_text(plan, width=_width()))
    if output:
        print(f"wrote    {output}\nnext     hflow exec {output}")


@app.command("exec")
def exec_command(
    graph: Annotated[Path, typer.Argument(help="A graph file, or a plan.json that is executed as it is.")],
    cluster: ClusterFile = None,
    pin: Pins = None,
    set_: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder to fill; default runs/NAME-TIME.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster instead of starting one.")
    ] = None,
    workers: Annotated[Workers, typer.Option(help="inline: one worker in this process.")] = Workers.ray,
) -> None:
    """Run a graph (or a plan) to its end, and leave a run folder with metrics, report and trained models."""
    if graph.suffix == ".json":
        plan = _read_plan(graph, cluster, pin, set_)
    else:
        plan = _compile(graph, cluster, pin, set_)
    from hflow.runtime.execute import execute

    run = execute(plan, run_dir=run_dir, address=address, workers=workers.value)
    print(f"run folder  {run.folder}")


@app.command("new-model")
def new_model_command(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    family: Annotated[str, typer.Option(help="llama or qwen2.")] = "qwen2",
    layers: Annotated[int, typer.Option(min=1)] = 3,
    hidden: Annotated[int, typer.Option(min=1)] = 128,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Default: as many as heads.")] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="Default: 4 x hidden.")] = None,
    alphabet: Annotated[str | None, typer.Option(help="Characters; default: printable ASCII.")] = None,
    max_positions: Annotated[int, typer.Option(min=1)] = 512,
    tied: Annotated[bool, typer.Option(help="Share embedding and output weights.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    force: Annotated[bool, typer.Option(help="Overwrite the folder.")] = False,
) -> None:
    """Make a tiny random-weight HF model with a character tokenizer, to try things on."""
    from hflow.runtime.new_model import ALPHABET, new_model

    size = new_model(
        folder, family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
        alphabet=alphabet or ALPHABET, max_positions=max_positions, tied=tied, seed=seed, force=force,
    )  # fmt: skip
    print(f"wrote {folder}: {family}, {size:,} parameters")


def _load(path: Path, overrides: Sequence[str] | None) -> Any:
    from hflow.graph.load import check as check_file

    graph, warnings = check_file(path, tuple(overrides or ()))
    _print_diagnostics(warnings)
    return graph


def _compile(
    path: Path, cluster: str | None, pins: Sequence[str] | None, overrides: Sequence[str] | None
) -> Any:
    from hflow.compiler.cluster_file import load_cluster
    from hflow.compiler.compile import compile_graph

    graph = _load(path, overrides)
    return compile_graph(graph, load_cluster(cluster or DEFAULT_CLUSTER), pins or ())


def _read_plan(path: Path, *given: str | Sequence[str] | None) -> Any:
    from hflow.compiler.plan import load_plan

    if any(given):
        message = "--cluster, --pin and --set are for graphs; a plan is executed as it is"
        raise HflowError(Diagnostic("HF306", message, help="compile the graph with them"))
    return load_plan(path)


def _width() -> int:
    return max(100, shutil.get_terminal_size((100, 24)).columns)


def _print_diagnostics(diagnostics: Iterable[Diagnostic]) -> None:
    for diagnostic in diagnostics:
        print(render(diagnostic, _sources(diagnostic)), end="\n\n", file=sys.stderr)


def _sources(diagnostic: Diagnostic) -> dict[str, str]:
    """The text that the diagnostic points into; a command-line value stands for itself."""
    if not diagnostic.span:
        return {}
    try:
        return {diagnostic.span.file: Path(diagnostic.span.file).read_text(errors="replace")}
    except OSError:
        return {diagnostic.span.file: diagnostic.span.file.removeprefix("--set ")}


def main() -> NoReturn:
    """The entry point: what typer does not handle itself becomes an exit code here."""
    try:
        app()
    except HflowError as error:
        _print_diagnostics(error.diagnostics)
        sys.exit(1)
    except Terminated as ending:
        print("terminated", file=sys.stderr)
        sys.exit(128 + ending.number)
    sys.exit(0)


if __name__ == "__main__":
    main()
