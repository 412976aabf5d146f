"""When each instruction starts: as soon as its inputs exist and all its devices are free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hflow.compiler.draft import Draft
from hflow.compiler.plan import Instruction
from hflow.compiler.workload import rounds


def schedule(draft: Draft) -> Draft:
    """Fill in when nodes start (in the first round of their region) and what all their rounds take."""
    assert draft.step
    timeline = _Timeline(draft)
    timeline.walk(draft.step.instructions)
    nodes = tuple(
        replace(
            n,
            start_s=timeline.starts[n.node],
            time_s=n.time_s * rounds(draft.graph, draft.graph.node(n.node)),
        )
        for n in draft.nodes
    )
    return replace(draft, nodes=nodes, step_time_s=max(timeline.free.values(), default=0.0))


@dataclass
class _Timeline:
    """`free`: when each device has done what it was given; `starts`: when each node is first called."""

    draft: Draft
    free: dict[int, float] = field(default_factory=lambda: defaultdict[int, float](float))
    starts: dict[str, float] = field(default_factory=dict[str, float])

    def walk(self, instructions: Sequence[Instruction]) -> None:
        ends: list[float] = []
        for instruction in instructions:
            ready = [ends[i] for i in instruction.after] + [self.free[d] for d in instruction.devices]
            start = max(ready, default=0.0)
            if instruction.op == "call":
                self.starts.setdefault(instruction.target, start)
            end = self._end_s(instruction, start)
            ends.append(end)
            self.free.update(dict.fromkeys(instruction.devices, end))

    def _end_s(self, instruction: Instruction, start: float) -> float:
        assert self.draft.step
        if instruction.op == "loop":
            return self._loop_end_s(instruction, start)
        if instruction.op == "call":
            return start + self.draft.node_plan(instruction.target).time_s
        seconds = 0.0 if instruction.edge is None else self.draft.step.edges[instruction.edge].time_s
        return start + seconds / max(1, instruction.every)

    def _loop_end_s(self, loop: Instruction, start: float) -> float:
        self.free.update(dict.fromkeys(loop.devices, start))
        for _ in range(rounds(self.draft.graph, self.draft.graph.node(loop.target))):
            self.walk(loop.body)
        return max(self.free[d] for d in loop.devices)
