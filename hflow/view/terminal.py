"""Plans and measurements as text: the tables of `hflow compile` and `hflow explain --analyze`.

The text of a plan depends on nothing but the plan and the width, so tests compare it as a whole.
Names may be shortened where the width is small; numbers never are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import networkx as nx

from hflow.compiler.plan import DeviceMemory, EdgePlan, NodePlan, Plan
from hflow.compiler.workload import rounds
from hflow.graph.graph import Graph, Node, Region
from hflow.view import units, words
from hflow.view.measured import Compared, Metrics, compare, total
from hflow.view.table import Column, table
from hflow.view.timeline import Bar, Track, idle_fraction, planned_bars, planned_calls, tracks

LABEL = 9  # width of the words at the left margin
IN_ROUNDS = "↻ "  # before nodes that run in rounds within a step
_ASCII = str.maketrans({"▕": "|", "▏": "|", "·": ".", "…": "~", "↻": "*", "≤": "<="})

STAGE_COLUMNS: tuple[Column, ...] = (
    ("stage", "left"),
    ("model", "left"),
    ("device", "left"),
    ("engine", "left"),
    ("layout", "left"),
    ("start", "right"),
    ("time", "right"),
    ("mem/device", "right"),
)
EDGE_COLUMNS: tuple[Column, ...] = (
    ("edge", "left"),
    ("values", "left"),
    ("size", "right"),
    ("from", "left"),
    ("to", "left"),
    ("lowered to", "left"),
    ("cost", "right"),
)
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
    parts = [
        _header(plan, width),
        table(STAGE_COLUMNS, _stages(plan), width),
        table(EDGE_COLUMNS, _edges(plan.graph, plan.step.edges), width),
        _timeline(plan, width),
        _footer(plan, path, width),
    ]
    text = "\n\n".join(part for part in parts if part)
    return text.translate(_ASCII) if ascii_only else text


def measured_text(plan: Plan, metrics: Sequence[Metrics], width: int = 100) -> str:
    """Predicted beside measured seconds of every node that was measured, and of their sum.

    A line is flagged when the measured time differs from the predicted one by more than 25 %, and by more
    than 5 % of the step.

    Args:
        metrics: the lines of ``metrics.jsonl``, one per step.
    """
    nodes = compare(plan, metrics)
    return table(MEASURED_COLUMNS, [_compared(row) for row in (*nodes, total(nodes))], width)


def _compared(row: Compared) -> tuple[str, ...]:
    shown = "-" if row.ratio is None else f"{row.ratio:.2f}"
    flag = "!" if row.is_off else ""
    return (row.name, units.seconds(row.predicted_s), units.seconds(row.measured_s), shown, flag)


def _header(plan: Plan, width: int) -> str:
    graph, cluster, edges = plan.graph, plan.cluster, plan.step.edges
    num_weights = sum(e.kind == "weights" for e in edges)
    counts = (
        units.plural(len(graph.nodes), "node"),
        units.plural(len(edges) - num_weights, "data edge"),
        units.plural(num_weights, "weight edge"),
    )
    machines = f"{units.plural(cluster.hosts, 'host')} x {cluster.devices_per_host} {cluster.device.name}"
    links = f"{units.rate(cluster.intra_host.bandwidth)} inside"
    if cluster.hosts > 1:
        nics = f"{cluster.nics_per_host} x " if cluster.nics_per_host > 1 else ""
        links += f", {nics}{units.rate(cluster.inter_host.bandwidth)} between"
    tokens = f"{units.count(plan.tokens_per_step / plan.step_time_s)} tokens/s" if plan.step_time_s else "-"
    step = f"{units.seconds(plan.step_time_s)} per step"
    gap = "not all" if plan.search.gap is None else f"gap {plan.search.gap:.0%}"
    search = f"{units.plural(plan.search.explored, 'plan')} compared ({gap})"
    memory = units.size(cluster.device.memory_bytes)
    lines = [
        (graph.name, ", ".join(counts)),
        ("cluster", f"{cluster.name}: {machines}   {memory} each   {links}"),
        ("plan", f"{plan.hash}   {step}   {tokens}   {search}"),
        *(("rounds", f"{IN_ROUNDS}{region.name}: {_rounds(graph, region)}") for region in graph.regions[1:]),
        *(("carried", value) for value in words.all_carried(graph)),
    ]
    return "\n".join(_line(label, text, width) for label, text in lines)


def _rounds(graph: Graph, region: Region) -> str:
    least = units.plural(rounds(graph, graph.node(region.name)), "round")
    return f"{words.rule(region)}; times are those of {least}"


def _stages(plan: Plan) -> list[tuple[str, ...]]:
    """Nodes by the number of steps of the graph before them; those of one number could overlap."""
    depth = {n: i for i, nodes in enumerate(nx.topological_generations(plan.graph.dag()), 1) for n in nodes}
    inner = {region.name for region in plan.graph.regions[1:]}
    rows: list[tuple[str, ...]] = []
    shown = 0
    for node in sorted(plan.nodes, key=lambda n: (depth[n.node], n.start_s)):
        number = " " if depth[node.node] == shown else str(depth[node.node])
        shown = depth[node.node]
        mark = IN_ROUNDS if plan.graph.node(node.node).region in inner else ""
        rows.append((f"{number} {mark}{node.node}", *_stage(node)))
    return rows


def _stage(node: NodePlan) -> tuple[str, ...]:
    start, time = f"{node.start_s:.2f}", units.seconds(node.time_s)
    return (
        node.model or "-",
        units.devices(node.mesh.devices),
        node.engine,
        layout_text(node),
        start,
        time,
        units.size(node.memory_bytes),
    )


def layout_text(node: NodePlan) -> str:
    """``dp2 tp2``: the axes of the node's mesh that split anything, or ``-``."""
    return " ".join(f"{axis}{size}" for axis, size in node.mesh.axes if size > 1) or "-"


def _edges(graph: Graph, edges: Sequence[EdgePlan]) -> list[tuple[str, ...]]:
    """Weight edges, then the data edges that move rows; one line for those that stay in place."""
    shown = sorted((e for e in edges if not _stays(e)), key=lambda e: e.kind == "data")
    rows = [_edge(graph, e) for e in shown]
    if in_place := [e for e in edges if _stays(e)]:
        name = f"+ {units.plural(len(in_place), 'data edge')}"
        rows.append((name, "", units.size(sum(e.size_bytes for e in in_place)), "", "", "alias", "-"))
    return rows


def _stays(edge: EdgePlan) -> bool:
    return edge.kind == "data" and edge.collective == "alias"


def _edge(graph: Graph, edge: EdgePlan) -> tuple[str, ...]:
    weights = edge.kind == "weights"
    return (
        edge.name if weights else f"{edge.source} -> {edge.target}",
        _weights(graph.node(edge.target), graph) if weights else " ".join(edge.ports),
        units.size(edge.size_bytes),
        str(edge.source_layout or edge.source_mesh),
        str(edge.target_layout or edge.target_mesh),
        edge.collective,
        units.seconds(edge.time_s),
    )


def _weights(reader: Node, graph: Graph) -> str:
    assert reader.model
    age = words.age(graph.model(reader.model.model), reader.model.lag)
    return f"weights, {age}" if age else "weights"


def _timeline(plan: Plan, width: int) -> str:
    bars = planned_bars(plan)
    found = tracks(bars)
    end = max((b.end_s for b in bars), default=0.0)
    if not end:
        return ""
    label = max(len(_device_label(t)) for t in found) + 2
    cells = width - label - 2
    lines = [f"{_device_label(t):<{label}}{_bar_line(t.bars, end, cells)}" for t in found]
    right = f"{units.seconds(end)}   idle {idle_fraction(bars):.0%}"
    return "\n".join([*lines, f"{'':<{label}}0 s{right:>{cells - 2}}"])


def _device_label(track: Track) -> str:
    return f"device {units.devices(track.devices)}"


def _bar_line(bars: Sequence[Bar], end: float, cells: int) -> str:
    line = ""
    for bar in bars:
        start, stop = round(bar.start_s / end * cells), round(bar.end_s / end * cells)
        start = max(start, len(line))
        if stop > start:
            line = line.ljust(start, "·") + f"▕{bar.name}"[: stop - start].ljust(stop - start)
    return line.ljust(cells, "·") + "▏"


def _footer(plan: Plan, path: str, width: int) -> str:
    lines = [_line("peak", _peak(max(plan.memory, key=_filled)), width)] if plan.memory else []
    lines.append(_line("path", " -> ".join(critical_path(plan)), width))
    if path:
        lines.append(_line("next", f"hflow exec {path}", width))
    return "\n".join(lines)


def _filled(memory: DeviceMemory) -> float:
    return memory.peak_bytes / memory.capacity_bytes


def _peak(memory: DeviceMemory) -> str:
    parts = sorted(memory.parts.items(), key=lambda part: (-part[1], part[0]))
    made_of = " + ".join(f"{name} {units.size(value)}" for name, value in parts if value)
    of = f"{units.size(memory.peak_bytes)} of {units.size(memory.capacity_bytes)}"
    return f"{of} on device {units.devices(memory.devices)}" + (f" ({made_of})" if made_of else "")


def critical_path(plan: Plan) -> tuple[str, ...]:
    """The nodes that make the step as long as it is: each waits for the one before.

    Walks back from the node that ends last to what it waited for longest: a node that it reads, or
    one that occupied a device of its mesh.
    """
    dag = plan.graph.dag()
    ends = {n.node: planned_calls(plan, n)[-1][1] for n in plan.nodes}
    path: list[NodePlan] = []
    node = max(plan.nodes, key=lambda n: ends[n.node], default=None)
    while node:
        path.append(node)
        before = [n for n in plan.nodes if n not in path and _precedes(n, ends[n.node], node, dag)]
        node = max(before, key=lambda n: ends[n.node], default=None)
    return tuple(n.node for n in reversed(path))


def _precedes(first: NodePlan, end_s: float, second: NodePlan, dag: nx.DiGraph[str]) -> bool:
    """`end_s`: when `first` has ended for the last time in the step."""
    if dag.has_edge(first.node, second.node):
        return True
    shares = not set(first.mesh.devices).isdisjoint(second.mesh.devices)
    return shares and end_s <= second.start_s + 1e-9


def _line(label: str, text: str, width: int) -> str:
    """A word at the left margin and its text, continued under the text where it is too long."""
    whole = f"{label:<{LABEL - 1}} {text}"
    return textwrap.fill(whole, width, subsequent_indent=" " * LABEL, break_long_words=False)
