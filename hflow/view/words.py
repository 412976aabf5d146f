"""What pictures and tables call things: instructions, ways to run, and what takes several steps or rounds."""

from __future__ import annotations

from typing import assert_never

from hflow import units
from hflow.graph.ir import Graph, Input, Model, Region
from hflow.plan.node_plan import NodePlan, layout_text
from hflow.plan.program import Activity, Call, Offload, Onload, Program, SyncWeights, Transfer


def deed(program: Program, instruction: Activity) -> str:
    """A node's name for its call; else what is moved: ``rollout -> values``, ``actor => rollout``, ``onload
    critic_train``."""
    match instruction:
        case Call():
            return instruction.node
        case SyncWeights():
            return program.weight_edge(instruction).name
        case Transfer():
            edge = program.data_edge(instruction)
            return f"{edge.source} -> {edge.target}"
        case Onload() | Offload():
            return f"{instruction.op} {instruction.node}"
        case _:
            assert_never(instruction)


def layout(node: NodePlan) -> str:
    """How a node runs: ``dp2 tp2 zero1 offload``, or ``-`` where nothing is split."""
    return layout_text(node.mesh, node.strategy, node.offload) or "-"


def marks(node: NodePlan) -> str:
    """What `layout` says besides the sizes of the mesh: ``zero1 offload``, or nothing."""
    return " ".join((*node.strategy.marks, *("offload",) * node.offload))


def rule(region: Region) -> str:
    """How long a region goes on, and whom a surplus serves: ``until 128 rows kept, ≤ 16 rounds``."""
    waits = f", a surplus until {units.plural(region.max_age, 'update')} old" if region.max_age else ""
    return f"until {region.rows} rows kept, ≤ {units.plural(region.times, 'round')}{waits}"


def age(model: Model, lag: int) -> str:
    """Which weights a reader sees: ``1 update old``, ``every 50 steps``; empty for the newest."""
    if model.refresh:
        average = f", EMA {model.refresh.decay:g}" if model.refresh.decay else ""
        return f"every {units.plural(model.refresh.every, 'step')}{average}"
    return f"{units.plural(lag, 'update')} old" if lag else ""


def changed(share: float | None) -> str:
    """Of weights of which only changed ones are sent: ``2% changed``; empty where all are."""
    return f"{100 * share:.2g}% changed" if share else ""


def carried(value: Input) -> str:
    """Of an input that was made in an earlier step: ``lag 1, init 0``; rows have no `init`."""
    return f"lag {value.lag}, init {value.init:g}" if value.type.scalar else f"lag {value.lag}"


def all_carried(graph: Graph) -> list[str]:
    """All values that cross steps, with their readers: ``dual.weight -> advantages, lag 1, init 0``."""
    late = [(node, value) for node, value in graph.edges() if value.lag]
    return [f"{value.source} -> {node.name}, {carried(value)}" for node, value in late]
