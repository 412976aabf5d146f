"""Data that a graph names and that are not here: a plan does not need them, a run does."""

from __future__ import annotations

from collections.abc import Iterator
from glob import glob
from pathlib import Path

from hflow.diagnostics import Diagnostic
from hflow.graph.evaluation import named_graph
from hflow.graph.ir import Graph
from hflow.graph.row_sources import path_kind, row_sources


def missing_data(graph: Graph) -> tuple[Diagnostic, ...]:
    """A warning, HF403, for each file or folder that a data node reads, also in evaluations, and that is not
    there. What is on the hub is not looked for."""
    graphs = (graph, *(named_graph(graph, evaluation) for evaluation in graph.evaluations))
    return tuple(dict.fromkeys(found for each in graphs for found in _missing(each)))


def _missing(graph: Graph) -> Iterator[Diagnostic]:
    for node in (node for node in graph.nodes if node.op == "data"):
        paths = [path for source in row_sources(node.options) for path in source.paths]
        for path in (path for path in paths if path_kind(path) in ("file", "folder")):
            if not (Path(path).exists() or glob(path, recursive=True)):  # noqa: PTH207  (it may be absolute)
                message = f"`{node.name}` reads `{path}`, which is not here"
                help_ = "a run would end with that; paths are relative to where hflow runs"
                yield Diagnostic("HF403", message, node.span, help_, severity="warning")
