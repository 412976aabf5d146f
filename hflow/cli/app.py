"""The command line. User errors are diagnostics and exit code 1; Ctrl-C is 130, SIGTERM 143."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import hflow
from hflow.address_space import TORCH_BYTES, require_address_space
from hflow.cli.arguments import (
    load_graph,
    print_diagnostics,
    width,
    write_text,
)
from hflow.cli.check_command import check_command, counts_text
from hflow.cli.exec_command import exec_command
from hflow.cli.plan_commands import compile_command, explain_command
from hflow.cli.run_commands import app as runs_app
from hflow.cli.run_commands import export_command
from hflow.cli.sample_commands import samples_command, watch_command
from hflow.cli.show_command import show_command
from hflow.cli.sweep_command import sweep_command
from hflow.diagnostics import Diagnostic, HflowError, Terminated
from hflow.ending_signals import EndingSignals
from hflow.plan.families.registry import RUNNING
from hflow.whole_file import FULL

INTERRUPTED = 130  # by Ctrl-C
app = typer.Typer(
    name="hflow",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"hflow {hflow.__version__}")
        raise typer.Exit


class HeadOption(StrEnum):
    lm = "lm"
    scalar = "scalar"


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compile RLHF algorithms, declared as typed dataflow graphs, to parallel plans, and run them."""


app.command("check")(check_command)


app.command("show")(show_command)


@app.command()
def fmt(
    files: Annotated[list[Path], typer.Argument(help="Graph files.", show_default=False)],
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 1 if a file is not formatted.")
    ] = False,
) -> None:
    """Write graph files in their canonical form. Comments stay; the meaning never changes."""
    from hflow.graph.write.formatter import format_file

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
    from hflow.graph.write.json_schema import json_schema_text

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
    from hflow.graph.write.new_file import new_file
    from hflow.shipped import find

    source = find(origin, "algorithms", "algorithm")
    path = new_file(name, source, force)
    print(f"wrote  {path}, from {source}")
    graph = load_graph(path)
    print(f"ok     {graph.name}: {counts_text(graph)}")
    print(f"next   hflow check {path}\n       hflow compile {path}")


app.command("compile", short_help="Plan a graph: who runs where, what moves, time and memory.")(
    compile_command
)
app.command("sweep", short_help="Plan a graph for every combination of clusters and values.")(sweep_command)
app.command("explain", short_help="Print a plan again; with a run, predicted beside measured.")(
    explain_command
)
app.command("exec", short_help="Run a graph or a plan; leaves a run folder and its models.")(exec_command)
app.add_typer(runs_app, name="runs")
app.command("export", short_help="Write trained models as Hugging Face folders.")(export_command)
app.command("samples", short_help="Show what a run has sampled, with rewards.")(samples_command)
app.command("watch", short_help="Watch a run, also of another process.")(watch_command)


@app.command("new-model", short_help="Make a tiny HF model with random weights, to try things on.")
def new_model_command(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    family: Annotated[str, typer.Option(help=f"{', '.join(RUNNING)}.")] = "qwen2",
    layers: Annotated[int, typer.Option(min=1)] = 3,
    hidden: Annotated[int, typer.Option(min=1)] = 128,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Default: as many as heads.")] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="Default: 4 x hidden.")] = None,
    alphabet: Annotated[str | None, typer.Option(help="Characters; default: printable ASCII.")] = None,
    experts: Annotated[
        int | None, typer.Option(min=2, help="In each layer, of gpt_oss, mixtral and qwen3_moe; default: 8.")
    ] = None,
    max_positions: Annotated[int, typer.Option(min=1)] = 512,
    tied: Annotated[bool, typer.Option(help="Share embedding and output weights.")] = False,
    head: Annotated[HeadOption, typer.Option(help="scalar: a critic, reward or cost model.")] = HeadOption.lm,
    chat_template: Annotated[
        str | None, typer.Option(metavar="NAME", help="chatml: with a chat template and its special tokens.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    force: Annotated[bool, typer.Option(help="Overwrite the folder.")] = False,
) -> None:
    """Make a tiny random-weight HF model with a character tokenizer, to try things on."""
    require_address_space(TORCH_BYTES, "new-model")
    from hflow.runtime.tools.new_model import ALPHABET, new_model

    size = new_model(
        folder, family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
        alphabet=alphabet or ALPHABET, max_positions=max_positions, tied=tied, head=head.value, seed=seed,
        force=force, chat_template=chat_template, experts=experts,
    )  # fmt: skip
    print(f"wrote {folder}: {family}, {size:,} parameters")


@app.command("calibrate", short_help="Measure this machine; write a cluster file.")
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
    require_address_space(TORCH_BYTES, "calibrate")
    from hflow.plan.cluster_text import cluster_text
    from hflow.runtime.tools.calibrate import calibrate

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
    write_text(output, text)
    print(f"wrote                   {output}\nnext                    hflow compile GRAPH --cluster {output}")


@app.command("doctor", short_help="Tell what works on this machine.")
def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    no_start: Annotated[bool, typer.Option("--no-start", help="Start no engine.")] = False,
) -> None:
    """Tell what works on this machine: each engine is started on a tiny model. Takes up to a minute."""
    require_address_space(TORCH_BYTES, "doctor")
    from hflow.doctor.command import doctor_command

    doctor_command(json_, not no_start, width())


def main() -> NoReturn:
    """The entry point: what typer does not handle itself becomes an exit code here."""
    with EndingSignals() as signals:
        code = _printed(_outcome(signals))
        signals.ignore()
    if signals.asked:
        _leave(code)
    sys.exit(code)


def _outcome(signals: EndingSignals) -> int | str | None:
    """The exit code of the command."""
    try:
        with signals.interruptible():
            app()
        return 0
    except OSError as error:
        if error.errno not in FULL:
            raise
        return _unprinted(error)
    except HflowError as error:
        print_diagnostics(error.diagnostics)
        return 1
    except (KeyboardInterrupt, Terminated) as ending:
        return _ended_by(ending)
    except SystemExit as ending:
        return _ended_by(KeyboardInterrupt()) if ending.code == INTERRUPTED else ending.code


def _printed(code: int | str | None) -> int | str | None:
    """The exit code, when all that was printed has gone where it should."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _unprinted(error)
    return code


def _unprinted(error: OSError) -> int:
    """Standard output takes no more: its disk is full, or nobody reads it."""
    with suppress(OSError):  # Python would try once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        print_diagnostics([Diagnostic("HF001", f"cannot write to standard output: {error.strerror}")])
    return 1


def _ended_by(ending: BaseException) -> int:
    is_asked = isinstance(ending, Terminated)
    print("terminated" if is_asked else "interrupted", file=sys.stderr)
    return 128 + ending.number if is_asked else INTERRUPTED


def _leave(code: int | str | None) -> NoReturn:
    """After a signal, with all cleaned up, past Python's own end: a Ray that was interrupted while it started
    may crash that, and a KeyboardInterrupt that has passed through an `exec` of a text, such as a dataclass
    makes when it is imported, kills the process with SIGINT there although it was caught."""
    if not isinstance(code, int):
        sys.exit(code)
    with suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
