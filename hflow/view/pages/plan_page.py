"""A plan as one HTML page: no scripts, nothing from elsewhere, on light and on dark screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hflow import units
from hflow.plan.origin import origin_of
from hflow.plan.plan import Plan
from hflow.view.picture.carried_origin import with_origin
from hflow.view.picture.figure import Figure
from hflow.view.picture.gantt import plan_gantt
from hflow.view.picture.memory_chart import memory_chart
from hflow.view.picture.rendering import render
from hflow.view.picture.svg import plan_svg
from hflow.view.terminal.program_text import program_text
from hflow.view.terminal.remarks import idle_fraction, remarks
from hflow.view.terminal.stages import EDGE_COLUMNS, STAGE_COLUMNS, edge_rows, stage_rows
from hflow.view.terminal.table import Column
from hflow.view.terminal.terminal import cluster_text, likely, search_text

STEPS = 3  # of a long run, on the time line
WHOLE_ARROW = "-\u2060>"  # a word joiner, so that no line ends within it


@dataclass(frozen=True)
class PageTable:
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]


def plan_html(plan: Plan) -> str:
    """The page, complete."""
    return render(
        "plan.html",
        title=plan.graph.name,
        doc=plan.graph.doc,
        figures=_figures(plan),
        remarks=[(label, text.replace("->", WHOLE_ARROW)) for label, text in remarks(plan)],
        graph=Markup(with_origin(plan_svg(plan), origin_of(plan))),
        narrow_graph=Markup(plan_svg(plan, narrow=True)),
        steps=STEPS,
        gantt=Markup(plan_gantt(plan, steps=STEPS)),
        memory=Markup(memory_chart(plan)),
        nodes=PageTable(STAGE_COLUMNS, stage_rows(plan.graph, plan.nodes)),
        edges=PageTable(EDGE_COLUMNS, edge_rows(plan.graph, plan.step.edges)),
        program=program_text(plan.step, plan.nodes),
    )


def _figures(plan: Plan) -> list[Figure]:
    rate = plan.tokens_per_step / plan.step_time_s if plan.step_time_s else 0.0
    used = f"on {units.plural(len(plan.devices), 'device')}, idle for {idle_fraction(plan):.0%}"
    return [
        Figure(
            "per step",
            units.seconds(plan.step_time_s),
            "; ".join(filter(None, ("predicted, of a long run", likely(plan)))),
        ),
        Figure("tokens per second", units.count(rate), used),
        Figure("cluster", plan.cluster.name, cluster_text(plan.cluster).replace("   ", ", ")),
        Figure("plan", plan.hash, search_text(plan.search)),
    ]
