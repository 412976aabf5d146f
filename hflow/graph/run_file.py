"""``run.yaml``: how a run is kept, in its folder; and what may be changed about that beside a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hflow.diagnostics import Diagnostic, HflowError, ordered
from hflow.graph.checks.run import check_reward, check_run, metric_names
from hflow.graph.ir import Graph
from hflow.graph.run_config import RunConfig
from hflow.graph.source import overrides as overriding
from hflow.graph.source.document import Document, Item, parse, read
from hflow.graph.source.expressions import substitute
from hflow.graph.source.extends import overlay
from hflow.graph.source.problems import Problems
from hflow.graph.source.run_section import RUN, config_of, is_of_run, is_only_run
from hflow.graph.source.validate import validate_run
from hflow.graph.write.yaml_printer import layout

FILE = "run.yaml"


def run_config_text(config: RunConfig) -> str:
    """The section `run` with every key, in canonical form."""
    policy, hang, samples, replan = config.checkpoint, config.hang, config.samples, config.replan
    checkpoint = {
        "every": policy.every,
        "seconds": _number(policy.seconds),
        "keep": policy.keep,
        "best": policy.best,
        "mode": policy.mode,
        "on_signal": policy.on_signal,
    }
    section = {
        "checkpoint": checkpoint,
        "export": config.export,
        "restarts": config.restarts,
        "grace": _number(config.grace_s),
        "retry": list(config.retry),
        "elastic": config.elastic,
        "wait": _number(config.wait_s),
        "hang": {
            "factor": _number(hang.factor),
            "least": _number(hang.least_s),
            "first": _number(hang.first_s),
        },
        "samples": {"every": samples.every, "rows": samples.rows, "keep_mb": _number(samples.keep_mb)},
        "trackers": list(config.trackers),
        "replan": {"every": replan.every, "moved": _number(replan.moved), "gain": _number(replan.gain)},
        "show": list(config.show),
    }
    return layout({RUN: section})


def _number(value: float) -> Any:
    """Without a point where it has no fraction."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_run_config(path: Path | str) -> RunConfig:
    """What a file says that `run_config_text` wrote.

    Raises:
        HflowError: HF001..HF005 when it cannot be read or is no YAML, HF1xx with the place of what is wrong
            with it.
    """
    spec, problems = validate_run(read(path))
    if spec is None:
        raise HflowError(ordered(problems))
    return config_of(spec)


def check_run_config(config: RunConfig, graph: Graph) -> tuple[Diagnostic, ...]:
    """The warnings about a configuration for a graph.

    Raises:
        HflowError: HF1xx for values that no file could hold, HF228 for what the graph does not have.
    """
    try:
        warnings = _checked(parse(run_config_text(config), FILE), graph)[1]
    except HflowError as error:  # in a file that nobody wrote
        raise HflowError(replace(problem, span=None) for problem in error.diagnostics) from None
    return tuple(replace(warning, span=None) for warning in warnings)


def only_of_run(overrides: Sequence[str], files: Sequence[Path | str]) -> bool:
    """Whether overrides and partial graph files change the section `run` alone.

    Raises:
        HflowError: HF001..HF005 for a file that cannot be read.
    """
    return all(map(is_of_run, overrides)) and all(is_only_run(read(file)) for file in files)


def overridden(
    config: RunConfig,
    graph: Graph,
    overrides: Sequence[str] = (),
    files: Sequence[Path | str] = (),
    origin: str = FILE,
) -> tuple[RunConfig, tuple[Diagnostic, ...]]:
    """`config` with partial graph files and overrides over it, all of them `only_of_run`, and the warnings.
    Expressions read the params of `graph`. `origin`: the file that `config` was read from.

    Raises:
        HflowError: as `hflow.graph.load.load` for the section.
    """
    start = parse(run_config_text(config), origin)
    params = {name: Item(value, start.root.span) for name, value in graph.params.items()}
    with_params = replace(
        start, root=start.root.replaced(("params",), Item(params, start.root.span, start.root.span))
    )
    merged = overriding.override(overlay(with_params, [read(file) for file in files]), overrides)
    evaluated, problems, _ = substitute(merged)
    if failed := [problem for problem in problems if problem.severity == "error"]:
        raise HflowError(failed)
    section = evaluated.get((RUN,))
    root = Item({RUN: section} if section else {}, start.root.span)
    return _checked(replace(start, root=root), graph)


def _checked(document: Document, graph: Graph) -> tuple[RunConfig, tuple[Diagnostic, ...]]:
    """The configuration, checked for the graph, and warnings."""
    spec, found = validate_run(document)
    problems = Problems(document)
    problems.found.extend(found)
    if spec:
        check_run(spec, metric_names(graph), problems)
        check_reward(spec, graph, problems)
    if spec is None or any(p.severity == "error" for p in problems.found):
        raise HflowError(ordered(p for p in problems.found if p.severity == "error"))
    return config_of(spec), ordered(problems.found)
