"""What nodes make in a run of one worker, where all rows are in one place: how long they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hflow.graph.ir import Node
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.runtime.engines.protocol import EngineCall, NodeEngine, Result
from hflow.runtime.execute import execute
from hflow.runtime.rows import Rows
from hflow.runtime.run import Run
from hflow.runtime.worker.models import Engines


@dataclass(frozen=True)
class Sizes:
    """Of all rows of a value: elements of each row, bytes of an element, and whether rows are ragged."""

    lengths: tuple[int, ...]
    element_bytes: int
    ragged: bool

    @staticmethod
    def of(rows: Rows) -> Sizes:
        lengths = [1] * len(rows) if rows.lengths is None else rows.lengths.tolist()
        return Sizes(tuple(lengths), rows.values.element_size(), rows.lengths is not None)

    def bytes(self, start: int, stop: int) -> int:
        return sum(self.lengths[start:stop]) * self.element_bytes


@dataclass(frozen=True)
class Recorded:
    """`sizes`: by step, node and port."""

    run: Run
    sizes: dict[tuple[int, str, str], Sizes] = field(default_factory=dict[tuple[int, str, str], Sizes])


@dataclass(frozen=True)
class _Recording:
    """An engine that notes what it makes in steps (not in evaluations)."""

    engine: NodeEngine
    sizes: dict[tuple[int, str, str], Sizes]

    def run(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        result = self.engine.run(call, inputs)
        for port, rows in result.outputs.items():
            if not call.evaluation:
                self.sizes[call.step, call.node.name, port] = Sizes.of(rows)
        return result


def recorded(plan: Plan, folder: Path) -> Recorded:
    """Run a plan of one worker in this process."""
    sizes: dict[tuple[int, str, str], Sizes] = {}
    engine_of = Engines.of

    def recording(engines: Engines, node: Node, plan: NodePlan) -> NodeEngine:
        return _Recording(engine_of(engines, node, plan), sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engines, "of", recording)
        return Recorded(execute(plan, folder, workers="inline", export=False), sizes)
