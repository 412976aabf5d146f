"""How well each node uses its devices: `hflow compile --efficiency`."""

from __future__ import annotations

from collections.abc import Iterator

from hflow import units
from hflow.cost.execution import Execution
from hflow.cost.time_split import model_flops, peak_of_mesh, time_split, tokens
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.plan.row_lengths import row_lengths
from hflow.plan.workload import workload
from hflow.view.terminal.table import Column, table

EFFICIENCY_COLUMNS: tuple[Column, ...] = (
    ("node", "left"),
    ("of step", "right"),
    ("MFU", "right"),
    ("tokens/s/device", "right"),
    ("compute", "right"),
    ("memory", "right"),
    ("communication", "right"),
    ("latency", "right"),
    ("bubble", "right"),
)


def efficiency_text(plan: Plan, width: int = 100) -> str:
    """A table of the step's nodes with models; the last columns are parts of a node's time."""
    return table(EFFICIENCY_COLUMNS, list(_rows(plan)), width)


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for own in (node for node in plan.nodes if node.model):
        op, run = plan.graph.node(own.node).op, execution(plan, own)
        split = time_split(op, run)
        whole = split.total_s
        parts = split.compute_s, split.memory_s, split.communication_s, split.latency_s, split.bubble_s
        yield (
            own.node,
            f"{own.time_s / plan.step_time_s:.0%}",
            f"{model_flops(op, run) / (peak_of_mesh(run) * whole):.1%}",
            units.count(tokens(op, run) / (len(own.mesh.devices) * whole)),
            *(f"{part / whole:.0%}" for part in parts),
        )


def execution(plan: Plan, own: NodePlan) -> Execution:
    """One execution of a node with a model, as it was priced."""
    node = plan.graph.node(own.node)
    assert node.model and own.model
    shape, dtype = plan.shapes[own.model], plan.graph.model(own.model).weight_dtype
    work = workload(node, row_lengths(plan.graph, node))
    return Execution(shape, dtype, work, own.mesh, own.micro_batch, plan.cluster, own.strategy)
