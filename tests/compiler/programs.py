"""Programs as text, for golden files and messages; and programs of plans made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hflow.compiler.compile import new_draft
from hflow.compiler.passes.lower_edges import lower_edges
from hflow.compiler.passes.schedule import schedule
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.state import Draft
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster, Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.program import (
    Carry,
    Instruction,
    Loop,
    Program,
    Recall,
    SyncWeights,
    handles_read,
    handles_written,
)


def program_text(program: Program) -> str:
    return "\n".join(_lines(program.instructions, ""))


def _lines(instructions: Sequence[Instruction], indent: str) -> Iterator[str]:
    for i in instructions:
        values, results = " ".join(sorted(handles_read(i))), " ".join(sorted(handles_written(i)))
        fields = "".join(f" {name} {value}" for name, value in _more(i).items() if value)
        yield f"{indent}{i.op:8} {i.node:12} @{i.devices} ({values}) -> ({results}) after {i.after}{fields}"
        if isinstance(i, Loop):
            yield from _lines(i.body, f"{indent}  ")


def _more(instruction: Instruction) -> dict[str, float]:
    match instruction:
        case Carry(lag=lag):
            return {"lag": lag}
        case Recall(lag=lag, init=init):
            return {"lag": lag, "init": init}
        case SyncWeights(every=every):
            return {"every": every}
        case _:
            return {}


def instant(devices: int) -> Cluster:
    """A host on which nothing takes time but nodes; each device has 4 GB, and 1 GB/s to the host's memory."""
    cluster = load_cluster(Path("clusters/local.yaml"))
    now = Link(1e30, 0.0)
    return replace(
        cluster, devices_per_host=devices, intra_host=now, inter_host=now, host_link=Link(1e9, 0.0)
    )


def node_plans(
    graph: Graph,
    meshes: Mapping[str, Mesh],
    times: Mapping[str, float],
    needs: Mapping[str, int] | None = None,
    offload: Iterable[str] = (),
) -> tuple[NodePlan, ...]:
    """A plan by hand: seconds and working sets are 0 where they are not given."""
    return tuple(
        NodePlan(
            node.name, node.op, node.model.model if node.model else None,
            "megatron" if node.model else "python", meshes[node.name], 1, 0.0, times.get(node.name, 0.0),
            (needs or {}).get(node.name, 0), offload=node.name in offload,
        )
        for node in graph.nodes
    )  # fmt: skip


def scheduled(graph: Graph, cluster: Cluster, nodes: tuple[NodePlan, ...]) -> Draft:
    """The draft that the planner would have handed on with these plans, after `schedule`."""
    return schedule(lower_edges(replace(weight_edges(new_draft(graph, cluster)), nodes=nodes)))
