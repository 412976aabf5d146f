"""Functions that a graph file names, read, with what is wrong told where the file names them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hflow.diagnostics import HflowError
from hflow.graph.infer.functions import FunctionSource, read_function
from hflow.graph.infer.kinds import data_options
from hflow.graph.row_sources import filter_function, filter_places
from hflow.graph.source.document import KeyPath
from hflow.graph.source.problems import Problems


def function_at(path: KeyPath, reference: str, found: Problems) -> FunctionSource | None:
    """The function, named at `path`; files are relative to the graph file. None where it cannot be read."""
    folder = Path(found.document.file).parent if found.document else Path()
    try:
        return read_function(reference, folder)
    except HflowError as error:
        for problem in error.diagnostics:
            found.add(problem.code, problem.message, path, help=problem.help)
        return None


def filters_at(
    path: KeyPath, options: Mapping[str, Any], found: Problems
) -> dict[tuple[str | int, ...], str]:
    """Filters that are functions, by their place in the options at `path`; files relative to where hflow
    runs.

    HF206 for a function that is no filter, beside the problems of `function_at`.
    """
    filters: dict[tuple[str | int, ...], str] = {}
    for place, text in filter_places(options):
        function, at = filter_function(text), (*path, *place)
        source = function_at(at, function, found) if function else None
        if source and (problem := data_options.function_problem(source)):
            found.add("HF206", f"`{text}`: {problem}", at)
        elif source and source.reference != function:
            filters[place] = source.reference
    return filters
