"""What a notebook shows for a graph, a plan or a run: a picture, and text where pictures do not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hflow import units
from hflow.graph.ir import Graph
from hflow.plan.origin import Origin, origin_of
from hflow.plan.plan import Plan
from hflow.view.measured import Metrics
from hflow.view.picture.carried_origin import with_origin
from hflow.view.picture.chart import line_chart
from hflow.view.picture.svg import graph_svg, plan_svg
from hflow.view.terminal.terminal import plan_text


def graph_bundle(graph: Graph) -> dict[str, str]:
    """MIME bundle of a graph; the text has one line per node with the types it makes."""
    head = f"graph {graph.name}: {graph.doc}".rstrip(": ")
    lines = [
        f"  {node.name:<16} {node.op:<9} {', '.join(f'{o.port}: {o.type}' for o in node.outputs)}".rstrip()
        for node in graph.nodes
    ]
    return {
        "image/svg+xml": with_origin(graph_svg(graph), Origin(graph.text)),
        "text/plain": "\n".join([head, *lines]),
    }


def plan_bundle(plan: Plan) -> dict[str, str]:
    """MIME bundle of a plan; the text is its table."""
    return {"image/svg+xml": with_origin(plan_svg(plan), origin_of(plan)), "text/plain": plan_text(plan)}


def run_bundle(
    name: str,
    status: str,
    metrics: Sequence[Metrics],
    evaluations: Mapping[int, float],
    evaluated: Mapping[str, Mapping[int, float]] | None = None,
) -> dict[str, str]:
    """MIME bundle of a run: the reward over its steps, or else the first loss; the text has the scores."""
    key = _charted(metrics)
    steps, values = [int(line["step"]) for line in metrics], [line.get(key) for line in metrics]
    scores = (
        f"  held out after {units.plural(step, 'step')}: {value:.3f}" for step, value in evaluations.items()
    )
    named = (
        f"  {key} after {units.plural(step, 'step')}: {value:.3f}"
        for key, by_step in (evaluated or {}).items()
        for step, value in by_step.items()
    )
    text = [f"run {name}: {status}, {units.plural(len(metrics), 'step')}", *scores, *named]
    return {"image/svg+xml": line_chart(f"{key} by step", steps, values), "text/plain": "\n".join(text)}


def _charted(metrics: Sequence[Metrics]) -> str:
    names = sorted({name for line in metrics for name in line})
    losses = [name for name in names if name.startswith("loss")]
    return "reward_mean" if "reward_mean" in names else next(iter(losses), "")
