"""The commands that make plans and show them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hflow.cli.arguments import (
    ClusterFile,
    EngineOptions,
    Files,
    Overrides,
    Pins,
    load_graph,
    print_diagnostics,
    width,
    write_text,
)
from hflow.cli.from_run import SeenRun
from hflow.cli.planning import make_plan, read_cluster
from hflow.cli.sensitivities import try_sensitivities
from hflow.compiler.options import DEFAULTS, PlacementPolicy, Planner, PlannerOptions
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.missing_data import missing_data
from hflow.whole_file import check_writable

AfterPass = Literal["weight_edges", "candidates", "place", "lower_edges", "schedule", "check_memory", "all"]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan's table as one JSON object.")]
Ascii = Annotated[bool, typer.Option("--ascii", help="Print no sign outside ASCII.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures.")]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write three steps for ui.perfetto.dev.")
]


def compile_command(
    graph: Annotated[
        Path | None,
        typer.Argument(help="A graph file, or the name of an algorithm: grpo.", show_default=False),
    ] = None,
    cluster: ClusterFile = None,
    pin: Pins = None,
    engine: EngineOptions = None,
    file: Files = None,
    set_: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
    trace: Trace = None,
    ascii_only: Ascii = False,
    placement: Annotated[
        PlacementPolicy,
        typer.Option(help="Models on the same devices, in two groups, or each apart; auto tries every way."),
    ] = DEFAULTS.placement,
    planner: Annotated[
        Planner,
        typer.Option(help="exact: branch and bound. exhaustive prices all plans. Others: to compare."),
    ] = DEFAULTS.planner,
    budget: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Then take the best plan that was found.")
    ] = DEFAULTS.budget_s,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Plan for the lengths of texts that this run saw."),
    ] = None,
    diff: Annotated[
        Path | None, typer.Option("--diff", metavar="PLAN", help="Tell what differs from this plan.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="NODE", help="Tell what else the node could have had.")
    ] = None,
    efficiency: Annotated[
        bool, typer.Option("--efficiency", help="Tell what the time of each node is spent on, and its MFU.")
    ] = False,
    sensitivities: Annotated[
        bool,
        typer.Option("--sensitivities", help="Tell what a step would take if one thing were otherwise."),
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="TECHNIQUE",
            help="Tell what a step would take with speculative or partial-rollouts.",
        ),
    ] = None,
    print_after: Annotated[
        AfterPass | None, typer.Option("--print-after", help="Print what a pass of the compiler has made.")
    ] = None,
) -> None:
    """Show who runs where, what moves, how long it takes and whether it fits. Needs no GPU.

    With --from no graph is needed, nor a cluster: they are the run's own. Its old plan is priced for the same
    lengths, and compared with the new one.
    """
    if as_json and (explain or efficiency or print_after or diff):
        others = "--explain, --efficiency, --print-after and --diff"
        raise typer.BadParameter(f"--json prints one object: leave out {others}")
    options = PlannerOptions(placement, planner, budget, tuple(engine or ()))
    run = SeenRun.read(from_) if from_ else None
    loaded = run.graph(graph, file, set_) if run else load_graph(_given(graph), file, set_)
    machines = run.plan.cluster if run and not cluster else read_cluster(cluster)
    if explain:
        _check_explained(loaded, explain)
    old = _read(diff) if diff else _former(output, loaded.name)
    old = run.as_planned(loaded, machines) if run and not old else old
    tried = _variations(loaded, machines, sensitivities, what_if or ())
    print_diagnostics(missing_data(loaded))
    for wanted in filter(None, (output, html, trace)):
        check_writable(wanted)
    started = time.perf_counter()
    plan = make_plan(loaded, machines, pin, options, _printer(print_after, ascii_only))
    seconds = time.perf_counter() - started
    written = _write(plan, output, html, trace)
    varied = try_sensitivities(plan, loaded, pin, options, tried)
    if as_json:
        _print_json(plan, seconds, more=_sensitivities_json(varied))
        return
    _print_plan(plan, ascii_only)
    if run:
        _say("\n" + run.lengths_text(), ascii_only)
        if not old:
            _say(
                "note     the run's plan does not fit this graph and cluster: nothing to compare",
                ascii_only,
            )
    _print_changes(old, plan, ascii_only)
    if efficiency:
        _print_efficiency(plan, ascii_only)
    if varied:
        _print_sensitivities(plan, varied, ascii_only)
    if explain:
        _explain(plan, pin, options, explain, ascii_only)
    print(written, end="")


def explain_command(
    plan: Annotated[
        Path, typer.Argument(help="A plan, as `hflow compile -o` writes it.", show_default=False)
    ],
    analyze: Annotated[
        Path | None,
        typer.Option("--analyze", metavar="RUN", help="A run folder: put what was measured beside it."),
    ] = None,
    html: Html = None,
    trace: Trace = None,
    as_json: AsJson = False,
    ascii_only: Ascii = False,
) -> None:
    """Print a plan again; with a run of it, predicted and measured times, and lengths planned and seen."""
    from hflow.graph.lengths_file import seen_in
    from hflow.view.measured import read_metrics
    from hflow.view.terminal.compiled_files import files_json, files_text
    from hflow.view.terminal.length_text import seen_lengths
    from hflow.view.terminal.terminal import measured_text

    found = _read(plan)
    metrics = read_metrics(analyze, found) if analyze else ()
    written = _write(found, None, html, trace)
    if as_json:
        _print_json(found, 0.0, metrics, files_json(found))
        return
    _print_plan(found, ascii_only)
    if files := files_text(found, width()):
        _say("\n" + files, ascii_only)
    if analyze:
        _say("\n" + measured_text(found, metrics, width()), ascii_only)
        if lengths := seen_lengths(found.graph, seen_in(analyze), width()):
            _say("\n" + lengths, ascii_only)
    print(written, end="")


def _given(graph: Path | None) -> Path:
    if graph is None:
        help_ = "`hflow compile GRAPH`, or `hflow compile --from RUN`"
        raise HflowError(Diagnostic("HF001", "there is no graph to compile", help=help_))
    return graph


def _read(path: Path) -> Any:
    from hflow.plan.plan_file import load_plan

    return load_plan(path)


def _former(output: Path | None, graph: str) -> Any:
    """The plan of the same graph that is about to be overwritten; None if there is none that can be read."""
    from hflow.plan.plan_file import is_plan

    if not output or not output.is_file() or not is_plan(output):
        return None
    try:
        old = _read(output)
    except HflowError:  # of another version: nobody asked for a comparison
        return None
    return old if old.graph.name == graph else None


def _printer(name: AfterPass | None, ascii_only: bool) -> Callable[[str, Any], None] | None:
    """Called with each pass and what it has made."""
    from hflow.view.terminal.drafts import draft_text

    def show(done: str, draft: Any) -> None:
        if name in (done, "all"):
            _say(draft_text(done, draft, width()), ascii_only)

    return show if name else None


def _write(plan: Any, output: Path | None, html: Path | None, trace: Path | None) -> str:
    """Write the files that were asked for; lines that say so."""
    from hflow.report.trace import chrome_trace
    from hflow.view.pages.plan_page import plan_html

    if output:
        plan.save(output)
    if html:
        write_text(html, plan_html(plan))
    if trace:
        write_text(trace, chrome_trace(plan))
    files = [str(path) for path in (output, html, trace) if path]
    wrote = f"wrote    {'  '.join(files)}\n" if files else ""
    return wrote + _next(plan, output)


def _next(plan: Any, saved: Path | None) -> str:
    """What to do with a saved plan; of any plan that can be made, but not run, why."""
    if reasons := _not_run(plan):
        return "".join(f"note     {reason}\n" for reason in reasons)
    return f"next     hflow exec {saved}\n" if saved else ""


def _not_run(plan: Any) -> list[str]:
    """Why no engine can run the plan; empty if one can."""
    from hflow.plan.verify.runnable import check_runnable

    try:
        check_runnable(plan)
    except HflowError as error:
        return [d.message for d in error.diagnostics]
    return []


def _print_plan(plan: Any, ascii_only: bool) -> None:
    from hflow.view.terminal.terminal import plan_text

    _say(plan_text(plan, width=width()), ascii_only)


def _print_changes(old: Any, plan: Any, ascii_only: bool) -> None:
    from hflow.view.terminal.diff import plan_diff
    from hflow.view.terminal.terminal import labelled

    if old:
        _say(labelled(plan_diff(old, plan), width()), ascii_only)


def _print_efficiency(plan: Any, ascii_only: bool) -> None:
    from hflow.view.terminal.efficiency import efficiency_text

    _say("\n" + efficiency_text(plan, width()) + "\n", ascii_only)


def _variations(graph: Any, cluster: Any, sensitivities: bool, techniques: Sequence[str]) -> tuple[Any, ...]:
    from hflow.report.sensitivity import variations
    from hflow.report.what_if import what_ifs

    return *(variations(graph, cluster) if sensitivities else ()), *what_ifs(techniques, graph)


def _print_sensitivities(plan: Any, rows: Sequence[Any], ascii_only: bool) -> None:
    from hflow.report.sensitivity_text import sensitivities_text

    _say("\n" + sensitivities_text(plan, rows, width()) + "\n", ascii_only)


def _sensitivities_json(rows: Sequence[Any]) -> dict[str, Any]:
    from hflow.report.sensitivity_text import sensitivities_json

    return {"sensitivities": sensitivities_json(rows)} if rows else {}


def _say(text: str, ascii_only: bool) -> None:
    from hflow.view.terminal.terminal import as_ascii

    print(as_ascii(text) if ascii_only else text)


def _print_json(
    plan: Any, seconds: float, metrics: Sequence[Any] = (), more: Mapping[str, Any] | None = None
) -> None:
    from hflow.view.terminal.plan_json import measured_json, plan_json

    measured = {"measured": measured_json(plan, metrics)} if metrics else {}
    print(
        json.dumps({**plan_json(plan, seconds), "compile_only": _not_run(plan), **(more or {}), **measured})
    )


def _check_explained(graph: Any, node: str) -> None:
    """Before the plan is made, which takes longer."""
    from hflow.compiler.explain.alternatives import check_explained

    check_explained(graph, node)


def _explain(
    plan: Any, pins: Sequence[str] | None, options: PlannerOptions, node: str, ascii_only: bool
) -> None:
    from hflow.compiler.explain.alternatives import explain
    from hflow.compiler.explain.own_forward import own_forward
    from hflow.view.terminal.alternatives import alternatives_text

    found = explain(plan, pins or (), options, node)
    _say("\n" + alternatives_text(node, found, width()), ascii_only)
    if reason := own_forward(plan, node):
        _say("\n" + reason, ascii_only)
