"""What each pass of the compiler has made, as text: `hflow compile --print-after PASS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hflow.compiler.candidates.node_groups import Option, Unit, Way, units
from hflow.compiler.state import Draft, WeightEdge
from hflow.units import plural, seconds, size
from hflow.view.terminal.program_text import program_text
from hflow.view.terminal.remarks import peak_text
from hflow.view.terminal.stages import EDGE_COLUMNS, STAGE_COLUMNS, edge_rows, stage_rows
from hflow.view.terminal.table import Column, table
from hflow.view.terminal.terminal import search_text

CANDIDATE_COLUMNS: tuple[Column, ...] = (
    ("node", "left"),
    ("devices", "right"),
    ("layout", "left"),
    ("micro-batch", "right"),
    ("time", "right"),
    ("while it runs", "right"),
    ("while idle", "right"),
)


def draft_text(name: str, draft: Draft, width: int = 100) -> str:
    """What pass `name` has made, under a line that says so."""
    return f"--- after {name}\n{_PRINTED[name](draft, width)}\n"


def _weight_edges(draft: Draft, width: int) -> str:
    return "\n".join(map(_weight_edge, draft.weight_edges)) or "no weights move"


def _weight_edge(edge: WeightEdge) -> str:
    age = f", {plural(edge.lag, 'update')} old" if edge.lag else ""
    every = f", every {plural(edge.every, 'step')}" if edge.every else ""
    return f"{edge.trainer} => {edge.reader}  weights of {edge.model}{age}{every}"


def _candidates(draft: Draft, width: int) -> str:
    """Every way of every node in every layout of its unit, the fastest first."""
    found = {unit.name: unit for unit in units(draft.graph, draft.engines)}
    rows = [
        row
        for name, by_size in draft.candidates.items()
        for options in by_size.values()
        for option in options
        for row in _ways(found[name], option)
    ]
    return table(CANDIDATE_COLUMNS, rows, width)


def _ways(unit: Unit, option: Option) -> Iterator[tuple[str, ...]]:
    for node, ways in zip(unit.nodes, option.ways):
        yield from (_way(node.name, option, way) for way in reversed(ways.ways))


def _way(node: str, option: Option, way: Way) -> tuple[str, ...]:
    sizes = {"pp": option.pp, "dp": option.dp, "tp": option.tp}
    marks = [f"{axis}{n}" for axis, n in sizes.items() if n > 1]
    marks += [*option.strategy.marks, *("recompute",) * (way.recompute == "full")]
    layout = " ".join([*marks, *("offload",) * option.offload]) or "-"
    memory = (size(way.need_bytes), size(option.idle_bytes))
    return (node, str(option.num_devices), layout, str(way.micro_batch), seconds(way.time_s), *memory)


def _place(draft: Draft, width: int) -> str:
    rows = stage_rows(draft.graph, draft.nodes)
    return f"{search_text(draft.search)}\n{table(STAGE_COLUMNS, rows, width)}"


def _lower_edges(draft: Draft, width: int) -> str:
    assert draft.step
    return table(EDGE_COLUMNS, edge_rows(draft.graph, draft.step.edges), width)


def _schedule(draft: Draft, width: int) -> str:
    programs = [p for p in (draft.step, draft.evaluation) if p]
    texts = [program_text(p, draft.nodes) for p in programs]
    return "\n".join([*texts, f"{seconds(draft.step_time_s)} per step"])


def _check_memory(draft: Draft, width: int) -> str:
    return "\n".join(map(peak_text, draft.memory))


_PRINTED: Mapping[str, Callable[[Draft, int], str]] = {
    "weight_edges": _weight_edges,
    "candidates": _candidates,
    "place": _place,
    "lower_edges": _lower_edges,
    "schedule": _schedule,
    "check_memory": _check_memory,
}
