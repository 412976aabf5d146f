"""Plans and measurements as text: the tables of `hflow compile` and `hflow explain`.

The text of a plan depends on nothing but the plan and the width, so tests compare it as a whole.
Names may be shortened where the width is small; numbers never are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hflow import units
from hflow.cost.prediction_interval import step_interval
from hflow.graph.ir import Graph, Region
from hflow.plan.cluster import Cluster
from hflow.plan.edges import WeightEdge
from hflow.plan.plan import Plan, Search
from hflow.plan.workload import rounds
from hflow.view import words
from hflow.view.measured import Compared, Metrics, compare, total
from hflow.view.terminal.length_text import planned_caches, planned_lengths
from hflow.view.terminal.remarks import idle_fraction, remarks
from hflow.view.terminal.stages import EDGE_COLUMNS, IN_ROUNDS, STAGE_COLUMNS, edge_rows, stage_rows
from hflow.view.terminal.table import Column, table
from hflow.view.timeline import Bar, end_s, steady_tracks

MOST_EDGES = 6  # data edges that have a line of their own
LABEL = 9  # width of the words at the left margin
MOVES = "─"  # fills bars of transfers, weights, and what goes to and from the host's memory
_ASCII = str.maketrans({"▕": "|", "▏": "|", "·": ".", "…": "~", "↻": "*", "≤": "<=", "─": "-"})

FAR_OFF = "! more than 25% off; `hflow calibrate` measures a machine for the plans to come"
MEASURED_COLUMNS: tuple[Column, ...] = (
    ("node", "left"),
    ("predicted", "right"),
    ("measured", "right"),
    ("ratio", "right"),
    ("", "left"),
)


def plan_text(plan: Plan, width: int = 100, path: str = "", ascii_only: bool = False) -> str:
    """The whole plan in `width` columns.

    Args:
        path: the file that the plan was written to; with it, the text ends in the command to run it.
        ascii_only: no character outside ASCII.
    """
    edges = edge_rows(plan.graph, plan.step.edges, MOST_EDGES)
    footer = [*remarks(plan), *([("next", f"hflow exec {path}")] if path else [])]
    parts = [
        _header(plan, width),
        table(STAGE_COLUMNS, stage_rows(plan.graph, plan.nodes), width),
        table(EDGE_COLUMNS, edges, width) if edges else "",
        _timeline(plan, width),
        labelled(footer, width),
    ]
    text = "\n\n".join(part for part in parts if part)
    return as_ascii(text) if ascii_only else text


def as_ascii(text: str) -> str:
    """Our own signs replaced; what a user's names hold besides shows as ``?``."""
    return text.translate(_ASCII).encode("ascii", "replace").decode()


def labelled(lines: Sequence[tuple[str, str]], width: int) -> str:
    """A word at the left margin and its text, continued under the text where it is too long."""
    return "\n".join(_line(label, text, width) for label, text in lines)


def measured_text(plan: Plan, metrics: Sequence[Metrics], width: int = 100) -> str:
    """Predicted beside measured seconds of every node that was measured, and of their sum.

    A line is flagged when the measured time differs from the predicted one by more than 25 %, and by more
    than 5 % of the step.

    Args:
        metrics: the lines of ``metrics.jsonl``, one per step.
    """
    nodes = compare(plan, metrics)
    rows = (*nodes, total(nodes))
    text = table(MEASURED_COLUMNS, [_compared(row) for row in rows], width)
    return f"{text}\n{FAR_OFF}" if any(row.is_off for row in rows) else text


def _compared(row: Compared) -> tuple[str, ...]:
    shown = "-" if row.ratio is None else f"{row.ratio:.2f}"
    flag = "!" if row.is_off else ""
    return (row.name, units.seconds(row.predicted_s), units.seconds(row.measured_s), shown, flag)


def _header(plan: Plan, width: int) -> str:
    graph, edges = plan.graph, plan.step.edges
    num_weights = sum(isinstance(e, WeightEdge) for e in edges)
    counts = (
        units.plural(len(graph.nodes), "node"),
        units.plural(len(edges) - num_weights, "data edge"),
        units.plural(num_weights, "weight edge"),
    )
    lines = [
        (graph.name, ", ".join(counts)),
        ("cluster", f"{plan.cluster.name}: {cluster_text(plan.cluster)}"),
        ("plan", f"{plan.hash}   {search_text(plan.search)}"),
        ("step", _step(plan)),
        *(("rounds", f"{IN_ROUNDS}{region.name}: {_rounds(graph, region)}") for region in graph.regions[1:]),
        *(("carried", value) for value in words.all_carried(graph)),
        *(("lengths", text) for text in planned_lengths(graph)),
        *(("cache", text) for text in planned_caches(plan)),
    ]
    return labelled(lines, width)


def _step(plan: Plan) -> str:
    if not plan.step_time_s:
        return "-"
    tokens = units.count(plan.tokens_per_step / plan.step_time_s)
    interval = f" ({likely(plan)})" if likely(plan) else ""
    return f"{units.seconds(plan.step_time_s)}{interval}   {tokens} tokens/s"


def likely(plan: Plan) -> str:
    """The interval in which a step's time probably lies; empty where nothing is known of it."""
    interval = step_interval(plan)
    return f"likely {units.interval(*interval)}" if interval else ""


def cluster_text(cluster: Cluster) -> str:
    """Its machines, their memory (of which plans may use a part) and links."""
    machines = f"{units.plural(cluster.hosts, 'host')} x {cluster.devices_per_host} {cluster.device.name}"
    links = f"{units.rate(cluster.intra_host.bandwidth)} inside"
    if cluster.hosts > 1:
        nics = f"{cluster.nics_per_host} x " if cluster.nics_per_host > 1 else ""
        links += f", {nics}{units.rate(cluster.inter_host.bandwidth)} between"
    device = cluster.device
    usable = (
        f"{units.size(device.usable_bytes).split()[0]} of "
        if device.usable_bytes < device.memory_bytes
        else ""
    )
    return f"{machines}   {usable}{units.size(device.memory_bytes)} each   {links}"


def search_text(search: Search) -> str:
    """``1,234 plans compared, proven best``; where it is not, why; the planner if not ours, and pins."""
    planner = "" if search.planner == "exact" else f"{search.planner}: "
    pinned = f" with {units.plural(len(search.pinned), 'node')} pinned" if search.pinned else ""
    compared = f"{search.explored:,} {'plan' if search.explored == 1 else 'plans'} compared"
    return f"{planner}{compared}{pinned}, {_proven(search)}"


def _proven(search: Search) -> str:
    if search.gap is None:
        return "not proven best"
    if not search.gap:
        return "proven best"
    return f"gap {_percent(search.gap)} (no plan under {units.seconds(search.bound_s)})"


def _percent(gap: float) -> str:
    """A gap never rounds to none."""
    return f"{gap:.0%}" if gap >= 0.005 else "<1%"


def _rounds(graph: Graph, region: Region) -> str:
    least = units.plural(rounds(graph, graph.node(region.name)), "round")
    return f"{words.rule(region)}; times are those of {least}"


def _timeline(plan: Plan, width: int) -> str:
    """One period of a long run, so that its end is the step's time."""
    tracks = steady_tracks(plan)
    end = max(plan.step_time_s, end_s(tracks))
    if not end or not tracks:
        return ""
    labels = [f"device {units.short_devices(track.devices)}" for track in tracks]
    label = max(map(len, labels)) + 2
    cells = width - label - 2
    lines = [f"{name:<{label}}{_bar_line(track.bars, end, cells)}" for name, track in zip(labels, tracks)]
    right = f"{units.seconds(end)}   idle {idle_fraction(plan):.0%}"
    return "\n".join([*lines, f"{'':<{label}}0 s{right:>{cells - 2}}"])


def _bar_line(bars: Sequence[Bar], end: float, cells: int) -> str:
    line = ""
    for bar in bars:
        start, stop = round(bar.start_s / end * cells), round(bar.end_s / end * cells)
        start = max(start, len(line))
        if stop > start:
            shown = f"▕{bar.name}"[: stop - start] if bar.kind == "call" else ""
            fill = " " if shown else MOVES
            line = line.ljust(start, "·") + shown.ljust(stop - start, fill)
    return line.ljust(cells, "·") + "▏"


def _line(label: str, text: str, width: int) -> str:
    whole = f"{label:<{LABEL - 1}} {text}"
    return textwrap.fill(whole, width, subsequent_indent=" " * LABEL, break_long_words=False)
