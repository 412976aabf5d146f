"""The command that tells what is wrong with a graph file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from hflow.cli.arguments import Files, GraphFile, Overrides, load_graph, refuse_plan
from hflow.diagnostics import Diagnostic, HflowError
from hflow.units import plural


def check_command(
    graph: GraphFile,
    file: Files = None,
    set_: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with all that is wrong.")
    ] = False,
) -> None:
    """Tell everything that is wrong with a graph file. Starts no process and needs no model."""
    if as_json:
        sys.exit(_check_as_json(graph, file or [], set_ or []))
    checked = load_graph(graph, file, set_)
    print(f"ok  {checked.name}: {counts_text(checked)}")


def counts_text(graph: Any) -> str:
    """``9 nodes, 13 data edges, 2 models, evaluation validation (1 metric)``."""
    counts = [
        plural(len(graph.nodes), "node"),
        plural(_num_edges(graph), "data edge"),
        plural(len(graph.models), "model"),
    ]
    counts += [f"evaluation {e.name} ({plural(len(e.metrics), 'metric')})" for e in graph.evaluations]
    return ", ".join(counts)


def _check_as_json(path: Path, files: list[Path], overrides: list[str]) -> int:
    """The exit code. Warnings and errors are told alike, in the object alone."""
    from hflow.graph.load import checked, read_graph

    told: dict[str, Any] = {"ok": False}
    try:
        refuse_plan(path)
        found = checked(read_graph(path), tuple(overrides), tuple(files))
        told = {"ok": True, "graph": _summary(found.graph)}
        diagnostics: Iterable[Diagnostic] = found.warnings
    except HflowError as error:
        diagnostics = error.diagnostics
    print(json.dumps({**told, "diagnostics": [_plain(d) for d in diagnostics]}))
    return 0 if told["ok"] else 1


def _summary(graph: Any) -> dict[str, Any]:
    return {
        "name": graph.name,
        "nodes": [node.name for node in graph.nodes],
        "data_edges": _num_edges(graph),
        "models": [model.name for model in graph.models],
        "evaluations": {each.name: [metric.name for metric in each.metrics] for each in graph.evaluations},
    }


def _plain(diagnostic: Diagnostic) -> dict[str, Any]:
    """`file` and what follows are null where a diagnostic has no place; lines and columns count from 1, and
    `end_column` is exclusive."""
    span = diagnostic.span
    place = {key: getattr(span, key, None) for key in ("file", "line", "column", "end_column")}
    said = {"severity": diagnostic.severity, "code": diagnostic.code, "message": diagnostic.message}
    return {**said, **place, "help": diagnostic.help}


def _num_edges(graph: Any) -> int:
    return sum(1 for _ in graph.edges())
