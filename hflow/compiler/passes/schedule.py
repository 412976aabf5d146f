"""When each instruction starts: as soon as its inputs exist and all its devices are free."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hflow.compiler.draft import Draft
from hflow.compiler.plan import Instruction


def schedule(draft: Draft) -> Draft:
    assert draft.step
    free: dict[int, float] = defaultdict(float)
    ends: list[float] = []
    starts: dict[str, float] = {}
    for instruction in draft.step.instructions:
        start = max(
            [ends[i] for i in instruction.after] + [free[d] for d in instruction.devices], default=0.0
        )
        end = start + _duration_s(draft, instruction)
        ends.append(end)
        free.update(dict.fromkeys(instruction.devices, end))
        if instruction.op == "call":
            starts[instruction.target] = start
    nodes = tuple(replace(n, start_s=starts[n.node]) for n in draft.nodes)
    return replace(draft, nodes=nodes, step_time_s=max(ends, default=0.0))


def _duration_s(draft: Draft, instruction: Instruction) -> float:
    assert draft.step
    if instruction.op == "call":
        return draft.node_plan(instruction.target).time_s
    return 0.0 if instruction.edge is None else draft.step.edges[instruction.edge].time_s
