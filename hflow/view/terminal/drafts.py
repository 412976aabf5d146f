"""What each pass of the compiler has made, as text: `hflow compile --print-after PASS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hflow.compiler.candidates.node_groups import Candidate, ExecConfig, NodeGroup, node_groups
from hflow.compiler.state import Draft, WeightRead
from hflow.cost.host_memory import alike_hosts, host_memory
from hflow.units import plural, seconds, size
from hflow.view.terminal.program_text import program_text
from hflow.view.terminal.remarks import host_text, peak_text
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


def _weight_edge(edge: WeightRead) -> str:
    age = f", {plural(edge.lag, 'update')} old" if edge.lag else ""
    every = f", every {plural(edge.every, 'step')}" if edge.every else ""
    return f"{edge.trainer} => {edge.reader}  weights of {edge.model}{age}{every}"


def _candidates(draft: Draft, width: int) -> str:
    """Every configuration of every node in every layout of its group, the fastest first."""
    found = {
        group.name: group
        for group in node_groups(draft.graph, draft.engines, draft.evaluation_graph, draft.sharing)
    }
    rows = [
        row
        for name, by_size in draft.candidates.items()
        for same_size in by_size.values()
        for candidate in same_size
        for row in _configs(found[name], candidate)
    ]
    return table(CANDIDATE_COLUMNS, rows, width)


def _configs(group: NodeGroup, candidate: Candidate) -> Iterator[tuple[str, ...]]:
    for node, front in zip(group.nodes, candidate.fronts):
        yield from (_config(node.name, candidate, config) for config in reversed(front.configs))


def _config(node: str, candidate: Candidate, config: ExecConfig) -> tuple[str, ...]:
    marks = [f"{axis}{n}" for axis, n in candidate.mesh(0).axes if n > 1]
    marks += [*candidate.strategy.marks, *("recompute",) * (config.recompute == "full")]
    layout = " ".join([*marks, *("offload",) * candidate.offload]) or "-"
    memory = (size(config.need_bytes), size(candidate.idle_bytes))
    return (
        node,
        str(candidate.num_devices),
        layout,
        str(config.micro_batch),
        seconds(config.time_s),
        *memory,
    )


def _place(draft: Draft, width: int) -> str:
    rows = stage_rows(draft.graph, draft.nodes)
    return f"{search_text(draft.search)}\n{table(STAGE_COLUMNS, rows, width)}"


def _lower_edges(draft: Draft, width: int) -> str:
    return table(EDGE_COLUMNS, edge_rows(draft.graph, draft.step.edges), width)


def _schedule(draft: Draft, width: int) -> str:
    texts = [program_text(p, draft.nodes) for p in draft.programs]
    return "\n".join([*texts, f"{seconds(draft.step_time_s)} per step"])


def _check_memory(draft: Draft, width: int) -> str:
    hosts = alike_hosts(host_memory(draft.graphs, draft.shapes, draft.cluster, draft.nodes))
    texts = [host_text(numbers, parts, draft.cluster) for numbers, parts in hosts]
    return "\n".join([*map(peak_text, draft.memory), *texts])


_PRINTED: Mapping[str, Callable[[Draft, int], str]] = {
    "weight_edges": _weight_edges,
    "candidates": _candidates,
    "place": _place,
    "lower_edges": _lower_edges,
    "schedule": _schedule,
    "check_memory": _check_memory,
}
