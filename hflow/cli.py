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

from hflow.diagnostics import Diagnostic, HflowError, Terminated, render, source_of

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


DEFAULT_CLUSTER = "local"


class Head(StrEnum):
    lm = "lm"
    scalar = "scalar"


class Workers(StrEnum):
    ray = "ray"
    inline = "inline"


@app.command()
def check(graph: GraphFile, file: Files = None, set_: Overrides = None) -> None:
    """Tell everything that is wrong with a graph file. Starts no process and needs no model."""
    checked = _load(graph, file, set_)
    print(f"ok  {checked.name}: {_counts(checked)}")


@app.command()
def show(
    graph: GraphFile,
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
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the graph into this file instead.")] = None,
) -> None:
    """Print what a graph file comes to, as text, or draw it."""
    from hflow.graph import load, printer, source
    from hflow.graph import resolved as resolving

    _refuse_plan(graph)
    if resolved:  # before it is checked: it helps to find out what is wrong
        print(resolving.resolved(load.assembled(source.read(graph), set_ or (), file or ())), end="")
    checked = _load(graph, file, set_)
    if svg:
        _draw(checked, svg)
    elif not resolved:
        print(printer.ir(checked), end="")


def _draw(graph: Any, path: Path) -> None:
    from hflow.view.svg import graph_svg

    try:
        path.write_text(graph_svg(graph) + "\n")
    except OSError as error:
        raise HflowError(Diagnostic("HF001", f"cannot write `{path}`: {error.strerror}")) from None
    print(f"drew {path}")


@app.command()
def fmt(
    files: Annotated[list[Path], typer.Argument(help="Graph files.", show_default=False)],
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 1 if a file is not formatted.")
    ] = False,
) -> None:
    """Write graph files in their canonical form. Comments stay; the meaning never changes."""
    from hflow.graph.formatter import format_file

    problems: list[Diagnostic] = []
    changed = 0
    for path in files:
        try:
            is_changed = format_file(path, write=not check)
        except HflowError as error:
            problems.extend(error.diagnostics)
            continue
        if is_changed:
            changed += 1
            print(f"{'not formatted' if check else 'formatted'}  {path}")
    if problems:
        raise HflowError(problems)
    if check and changed:
        sys.exit(1)


@app.command()
def schema() -> None:
    """Print the JSON Schema of graph files, for editors."""
    from hflow.graph.json_schema import json_schema_text

    print(json_schema_text(), end="")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the graph; the file is NAME.yaml, here.")],
    origin: Annotated[
        str, typer.Option("--from", metavar="ALGORITHM", help="A graph file, or the name of an algorithm.")
    ] = "grpo",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Start a graph file of your own from an algorithm that works."""
    from hflow.graph.new_file import new_file
    from hflow.shipped import find

    source = find(origin, "algorithms", "algorithm")
    path = new_file(name, source, force)
    print(f"wrote  {path}, from {source}")
    graph = _load(path)
    print(f"ok     {graph.name}: {_counts(graph)}\nnext   hflow check {path}\n       hflow compile {path}")


@app.command("compile")
def compile_command(
    graph: GraphFile,
    cluster: ClusterFile = None,
    pin: Pins = None,
    file: Files = None,
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
    plan = _compile(graph, cluster, pin, file, set_)
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
    file: Files = None,
    set_: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder to fill; default runs/NAME-TIME.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster instead of starting one.")
    ] = None,
    workers: Annotated[Workers, typer.Option(help="inline: one worker in this process.")] = Workers.ray,
) -> None:
    """Run a graph (or a plan) to its end, and leave a run folder with metrics, report and trained models."""
    if graph.suffix == ".json":
        plan = _read_plan(graph, cluster, pin, file, set_)
    else:
        plan = _compile(graph, cluster, pin, file, set_)
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
    head: Annotated[Head, typer.Option(help="scalar: a critic, reward or cost model.")] = Head.lm,
    seed: Annotated[int, typer.Option()] = 0,
    force: Annotated[bool, typer.Option(help="Overwrite the folder.")] = False,
) -> None:
    """Make a tiny random-weight HF model with a character tokenizer, to try things on."""
    from hflow.runtime.new_model import ALPHABET, new_model

    size = new_model(
        folder, family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
        alphabet=alphabet or ALPHABET, max_positions=max_positions, tied=tied, head=head.value, seed=seed,
        force=force,
    )  # fmt: skip
    print(f"wrote {folder}: {family}, {size:,} parameters")


@app.command("calibrate")
def calibrate_command(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a cluster file, e.g. clusters/NAME.yaml.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Devices; default: all GPUs, or without any two CPU workers.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Measure this machine: matrix products, memory, and the link between two workers. Takes seconds."""
    from hflow.compiler.cluster_text import cluster_text
    from hflow.runtime.calibrate import calibrate

    if output and output.exists() and not force:
        raise HflowError(Diagnostic("HF001", f"`{output}` exists", help="name another, or pass --force"))
    name = output.stem if output else "here"
    cluster = calibrate(name, workers, lambda label, value: print(f"{label:<24}{value:>16}", flush=True))
    if output is None:
        print("next                    hflow calibrate --output clusters/NAME.yaml")
        return
    kind = f"{cluster.num_devices} {cluster.device.name}"
    text = cluster_text(
        cluster, f"Measured by `hflow calibrate` on {kind}, all at once. One host: inter_host is unused."
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    except OSError as error:
        raise HflowError(Diagnostic("HF001", f"cannot write `{output}`: {error.strerror}")) from None
    print(f"wrote                   {output}\nnext                    hflow compile GRAPH --cluster {output}")


def _load(path: Path, files: Sequence[Path] | None = None, overrides: Sequence[str] | None = None) -> Any:
    from hflow.graph.load import check as check_file

    _refuse_plan(path)
    graph, warnings = check_file(path, tuple(overrides or ()), tuple(files or ()))
    _print_diagnostics(warnings)
    return graph


def _refuse_plan(path: Path) -> None:
    """HF306: a plan stands where a graph is asked for."""
    if path.suffix != ".json":
        return
    from hflow.compiler.plan import is_plan

    if is_plan(path):
        help_ = f"`hflow exec {path}` runs it"
        raise HflowError(Diagnostic("HF306", f"`{path}` is a plan, not a graph", help=help_))


def _counts(graph: Any) -> str:
    from hflow.view.units import plural

    edges = sum(1 for _ in graph.edges())
    return ", ".join(
        (plural(len(graph.nodes), "node"), plural(edges, "data edge"), plural(len(graph.models), "model"))
    )


def _compile(
    path: Path,
    cluster: str | None,
    pins: Sequence[str] | None,
    files: Sequence[Path] | None,
    overrides: Sequence[str] | None,
) -> Any:
    from hflow.compiler.cluster_file import load_cluster
    from hflow.compiler.compile import compile_graph

    graph = _load(path, files, overrides)
    return compile_graph(graph, load_cluster(cluster or DEFAULT_CLUSTER), pins or ())


def _read_plan(path: Path, *given: str | Sequence[Any] | None) -> Any:
    from hflow.compiler.plan import load_plan

    if any(given):
        message = "--cluster, --pin, -f and --set are for graphs; a plan is executed as it is"
        raise HflowError(Diagnostic("HF306", message, help="compile the graph with them"))
    return load_plan(path)


def _width() -> int:
    return max(100, shutil.get_terminal_size((100, 24)).columns)


def _print_diagnostics(diagnostics: Iterable[Diagnostic]) -> None:
    for diagnostic in diagnostics:
        print(render(diagnostic, source_of(diagnostic)), end="\n\n", file=sys.stderr)


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
