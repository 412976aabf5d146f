"""What a worker asks of an engine. Engines execute one kind of node on local shards.

Engines never import ray and never talk to the controller. They may use the process groups of their
own mesh; values enter and leave as `Rows` that lie as the plan's layouts say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from hflow.graph.ir import Node
from hflow.plan.layout import Box
from hflow.plan.node_plan import NodePlan
from hflow.runtime.rows import Rows


@dataclass(frozen=True)
class Call:
    """One execution of a node in one step.

    `first_row` is the global index of the first row that this device holds of the node's *inputs*
    (for a `data` node: of its batch) and `num_rows` how many it holds; with the run's `seed` and
    `step` they make sampling and data order independent of the plan. In a repeat region `step` counts its
    rounds, over the whole run. `stream` tells the generate nodes of a graph apart, and so its data nodes.
    """

    node: Node
    plan: NodePlan
    first_row: int
    num_rows: int
    seed: int
    step: int
    evaluation: bool = False
    stream: int = 0

    @property
    def when(self) -> str:
        """For messages."""
        if self.node.region != "step":
            return f"round {self.step} of `{self.node.region}`"
        return f"the evaluation of step {self.step}" if self.evaluation else f"step {self.step}"


@dataclass(frozen=True)
class Result:
    """`metrics` are (sum, weight) pairs, added up over workers; a value replicated on several ranks
    is reported by one of them. `digest` adds up (mod 2^64) to a hash of a generate node's tokens. `end_s`:
    when a node had ended that was begun and waited for, in seconds since the epoch."""

    outputs: Mapping[str, Rows] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    digest: int | None = None
    end_s: float | None = None


class NodeError(Exception):
    """A node's failure with a cause that a user can read; `code` is a diagnostic code."""

    def __init__(self, node: str, message: str, code: str = "HF401"):
        super().__init__(message)
        self.node = node
        self.message = message
        self.code = code


class Stopped(Exception):  # noqa: N818  (it is what happened)
    """Nobody waits for the node any more: another worker failed."""


class Engine(Protocol):
    def run(self, call: Call, inputs: Mapping[str, Rows]) -> Result:
        """Execute the node on the local rows. Collective over the engine's mesh."""
        ...


class Weights(Protocol):
    """The weights of one model on one device, as boxes of HF parameters (`compiler.weights`).

    `changed`: they were written since whoever keeps a copy of them last looked.
    """

    changed: bool

    def names(self) -> Sequence[str]:
        """The parameters of which this device holds a part, by their HF names."""
        ...

    def box(self, name: str) -> Box:
        """That part, in global indices."""
        ...

    def view(self, name: str, box: Box) -> Tensor:
        """The memory of `box` (global indices, inside the part): its elements in order, in whatever shape,
        lying together or not. Whoever writes there sets `changed`."""
        ...


class Versioned(Protocol):
    """Weights that know how many steps have trained them."""

    version: int
