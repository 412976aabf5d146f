"""A run as one HTML page: no scripts, nothing from elsewhere, readable on paper and on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from markupsafe import Markup

from hflow import units
from hflow.diagnostics import Diagnostic
from hflow.diagnostics import render as render_diagnostic
from hflow.graph.ir import Graph
from hflow.plan.origin import origin_of
from hflow.plan.plan import Plan
from hflow.view.measured import Compared, Metrics, compare
from hflow.view.picture.carried_origin import with_origin
from hflow.view.picture.chart import line_chart
from hflow.view.picture.figure import Figure
from hflow.view.picture.gantt import plan_gantt, run_gantt
from hflow.view.picture.rendering import render
from hflow.view.picture.svg import plan_svg
from hflow.view.terminal.terminal import plan_text
from hflow.view.timeline import last_step

FIRST = ("reward_mean", "loss", "tokens_per_s")  # charts in this order, then all others by name
STILL = 1e-6  # a metric that changes by this share of itself, or stays below it, has no chart
NOT_CHARTED = ("step", "time_s", "digest.")


@dataclass(frozen=True)
class RunReport:
    """What a run left behind.

    `metrics` are the lines of ``metrics.jsonl``, one per step; `events` those of measured calls and
    transfers (step, device, name, kind, start_s, end_s); `summary` has status, steps, wall_s,
    tokens_per_s, plan_hash and, where the graph is evaluated, eval: {before, after, by_step},
    and evaluations: the same for each metric of the named ones; `samples` says of how many steps there are
    samples, on a page beside this one; plan_step the step with which `plan` began, where others came before.
    """

    plan: Plan
    metrics: Sequence[Metrics]
    summary: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]] = ()
    diagnostics: Sequence[Diagnostic] = ()


@dataclass(frozen=True)
class Chart:
    name: str
    latest: str
    svg: Markup


@dataclass(frozen=True)
class ComparedBars:
    """A node's predicted and measured seconds, as text; `width` of 100 is the longest bar."""

    name: str
    predicted: str
    measured: str
    ratio: str
    off: bool
    predicted_width: float
    measured_width: float


def report_html(report: RunReport) -> str:
    """The page, complete."""
    plan, graph = report.plan, report.plan.graph
    step = last_step(report.events)
    held_out, charts = _held_out(report), _charts(graph, report.metrics)
    leading = [chart for chart in charts if chart.name == FIRST[0]]
    return render(
        "report.html",
        title=graph.name,
        doc=graph.doc,
        status=str(report.summary.get("status", "unknown")),
        figures=_figures(report),
        problems=[render_diagnostic(d) for d in report.diagnostics],
        leading=[*held_out, *leading],
        charts=[chart for chart in charts if chart not in leading],
        still=_still(graph, report.metrics),
        graph=Markup(with_origin(plan_svg(plan), origin_of(plan))),
        narrow_graph=Markup(plan_svg(plan, narrow=True)),
        plan=plan_text(plan),
        compared=_compared(compare(plan, _of_plan(report))),
        planned=Markup(plan_gantt(plan)),
        measured=Markup(run_gantt(plan, report.events, step)) if step is not None else None,
        step=step,
        samples="samples.html" if report.summary.get("samples") else "",
    )


def _of_plan(report: RunReport) -> list[Metrics]:
    """Of the steps under the plan."""
    began = report.summary.get("plan_step", 0)
    return [line for line in report.metrics if line["step"] >= began]


def _figures(report: RunReport) -> list[Figure]:
    summary, plan = report.summary, report.plan
    figures: list[Figure] = []
    if evaluation := summary.get("eval"):
        metric = str(plan.graph.evaluation.metric) if plan.graph.evaluation else "evaluation"
        before, after = evaluation.get("before"), evaluation.get("after")
        figures.append(Figure(metric, f"{_score(before)} → {_score(after)}", "held out, before → after"))
    figures += _evaluated_figures(report)
    figures.append(Figure("steps", str(summary.get("steps", "-")), f"of {plan.graph.steps}"))
    if "wall_s" in summary:
        figures.append(Figure("wall time", units.duration(summary["wall_s"])))
    if "tokens_per_s" in summary:
        rate = units.count(summary["tokens_per_s"])
        figures.append(Figure("tokens per second", rate, f"on {units.plural(len(plan.devices), 'device')}"))
    figures.append(Figure("plan", str(summary.get("plan_hash", plan.hash)), f"for {plan.cluster.name}"))
    return figures


def _evaluated_figures(report: RunReport) -> list[Figure]:
    """The first metric of each named evaluation, before and after; others have charts."""
    found: Mapping[str, Any] = report.summary.get("evaluations") or {}
    figures: list[Figure] = []
    for named in report.plan.graph.evaluations:
        if told := found.get(named.keys[0]):
            by_step = _by_step(told)
            first, last = by_step[min(by_step)], by_step[max(by_step)]
            when = f"{named.rows} rows, after {min(by_step)} → {units.plural(max(by_step), 'step')}"
            figures.append(Figure(named.keys[0], f"{_score(first)} → {_score(last)}", when))
    return figures


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _held_out(report: RunReport) -> list[Chart]:
    """The metrics of evaluations after each number of steps at which they were taken."""
    found: Mapping[str, Any] = report.summary.get("eval") or {}
    evaluation = report.plan.graph.evaluation
    name = f"held-out {evaluation.metric if evaluation else 'evaluation'}"
    named: Mapping[str, Any] = report.summary.get("evaluations") or {}
    return [*_by_steps(name, found), *(chart for key in named for chart in _by_steps(key, named[key]))]


def _by_steps(name: str, found: Mapping[str, Any]) -> list[Chart]:
    values = _by_step(found)
    if not values:
        return []
    steps = sorted(values)
    svg = line_chart(f"{name} by steps done", steps, [values[step] for step in steps])
    return [Chart(name, units.figure(values[steps[-1]]), Markup(svg))]


def _by_step(found: Mapping[str, Any]) -> dict[int, float]:
    """In a file the keys are texts."""
    by_step: Mapping[Any, float] = found.get("by_step") or {}
    return {int(step): value for step, value in by_step.items()}


def _charts(graph: Graph, metrics: Sequence[Metrics]) -> list[Chart]:
    """One for each numeric metric that changes; of reward, losses and speed in any case."""
    names = _numeric(graph, metrics)
    return [_chart(n, metrics) for n in names if n.startswith(FIRST) or not _is_still(n, metrics)]


def _still(graph: Graph, metrics: Sequence[Metrics]) -> list[str]:
    """``actor_train.lr 0.0001`` of each metric without a chart."""
    names = _numeric(graph, metrics)
    still = [name for name in names if not name.startswith(FIRST) and _is_still(name, metrics)]
    return [f"{name} {_chart(name, metrics).latest}" for name in still]


def _numeric(graph: Graph, metrics: Sequence[Metrics]) -> list[str]:
    """In order; the reward, which a run also writes as `reward_mean`, is shown once."""
    names = {name for line in metrics for name, value in line.items() if isinstance(value, int | float)}
    if "reward_mean" in names:
        names.discard(graph.reward)
    return sorted((n for n in names if not n.startswith(NOT_CHARTED)), key=_chart_order)


def _is_still(name: str, metrics: Sequence[Metrics]) -> bool:
    """In every step the same number, but for rounding; rates of learning may be as small as that."""
    values = [line.get(name) for line in metrics]
    known = [value for value in values if value is not None and isfinite(value)]
    if len(known) < len(values) or len(values) < 2:
        return False
    largest = max(map(abs, known))
    is_small = largest <= STILL and not name.endswith(".lr")
    return is_small or max(known) - min(known) <= STILL * largest


def _chart_order(name: str) -> tuple[int, str]:
    return next((i for i, start in enumerate(FIRST) if name.startswith(start)), len(FIRST)), name


def _chart(name: str, metrics: Sequence[Metrics]) -> Chart:
    steps = [int(line["step"]) for line in metrics]
    values: list[float | None] = [line.get(name) for line in metrics]
    latest = next((v for v in reversed(values) if v is not None), None)
    shown = "-" if latest is None else units.figure(latest)
    return Chart(name, shown, Markup(line_chart(f"{name} by step", steps, values)))


def _compared(nodes: Sequence[Compared]) -> list[ComparedBars]:
    longest = max((max(n.predicted_s, n.measured_s) for n in nodes), default=0.0) or 1.0
    return [_bars(node, longest) for node in nodes]


def _bars(node: Compared, longest_s: float) -> ComparedBars:
    return ComparedBars(
        node.name,
        units.seconds(node.predicted_s),
        units.seconds(node.measured_s),
        "-" if node.ratio is None else f"{node.ratio:.2f}",
        node.is_off,
        round(100 * node.predicted_s / longest_s, 2),
        round(100 * node.measured_s / longest_s, 2),
    )
