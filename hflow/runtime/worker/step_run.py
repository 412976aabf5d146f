"""One walk through a program: the values that are there, what is under way, and what is to be told of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hflow.graph.ir import Node
from hflow.plan.program import Await, Program
from hflow.runtime.engines.protocol import ModelWeights, Result
from hflow.runtime.rows import Rows
from hflow.runtime.worker.collector import Collector
from hflow.runtime.worker.sample_parts import SampleParts
from hflow.runtime.worker.text_lengths import text_lengths


@dataclass
class Begun:
    """A node under way, from `start_s` to `end_s` in seconds since the epoch."""

    inputs: Mapping[str, Rows]
    start_s: float
    end_s: float | None = None


@dataclass
class StepRun:
    """What one walk through a program collects."""

    program: Program
    number: int
    evaluation: bool
    name: str = ""  # of a named evaluation
    store: dict[str, Rows] = field(default_factory=dict[str, Rows])
    collectors: dict[str, Collector] = field(default_factory=dict[str, Collector])
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    digests: dict[str, int] = field(default_factory=dict[str, int])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    begun: dict[str, Begun] = field(default_factory=dict[str, "Begun"])
    tokens: int = 0
    trained: set[ModelWeights] = field(default_factory=set[ModelWeights])
    samples: SampleParts | None = None
    lengths: dict[str, Counter[int]] = field(default_factory=dict[str, "Counter[int]"])

    def awaits(self, node: str) -> bool:
        """Whether a call of the node only begins it."""
        return any(isinstance(i, Await) and i.node == node for i in self.program.instructions)

    def report(self) -> dict[str, Any]:
        names = ("metrics", "digests", "events", "tokens", "lengths")
        return {name: getattr(self, name) for name in names}

    def measure(self, node: str, result: Result) -> None:
        """Add a result's metrics and digest; a node of a region has one per round."""
        for name, (total, weight) in result.metrics.items():
            before = self.metrics.get(f"{node}.{name}", (0.0, 0.0))
            self.metrics[f"{node}.{name}"] = before[0] + total, before[1] + weight
        if result.digest is not None:
            self.digests[node] = (self.digests.get(node, 0) + result.digest) % 2**64

    def count_lengths(self, node: Node, result: Result) -> None:
        """Add those of the texts that a node of the step has made; in a region, in each round."""
        if not self.evaluation and (found := text_lengths(node, result.outputs)):
            self.lengths.setdefault(node.name, Counter()).update(found)
