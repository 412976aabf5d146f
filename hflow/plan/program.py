"""What every worker walks through in a step: instructions over handles, in an order that all share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hflow.graph.ir import Graph
from hflow.plan.edges import EdgePlan


@dataclass(frozen=True)
class Instruction:
    """One thing the workers on `devices` do.

    - ``call``: run node `target`; `inputs` and `outputs` map ports to handles in the worker's store; with an
      ``await`` in the same program, only begin to;
    - ``await``: wait until node `target`, which was called, has ended (`outputs`);
    - ``transfer``: execute data edge number `edge`; handles of its ports;
    - ``weights``: execute weight edge number `edge`, into the weights that node `target` reads; with
      `every`, only in steps that are multiples of it, and not in the first; if the trainer `lends` its
      memory, its own weights give it back, for they are a part of what is read;
    - ``recall``: put scalars of node `target` of `lag` steps ago into the store (`outputs`), `init` where
      there are none;
    - ``carry``: keep scalars of node `target` (`inputs`), for recalls up to `lag` steps from now;
    - ``loop``: run the rounds of region `target`, each of which is `body` and ends with the call of the
      region's own node; then put what was collected into the store (`outputs`);
    - ``onload``: bring what node `target` keeps in the host's memory (`NodePlan.offload`) to the devices;
    - ``offload``: the reverse;
    - ``release``: drop the weights that node `target` reads, of which it has a copy of its own; if the
      trainer `lends` its memory, its weights come back from them before;
    - ``free``: drop handles (`inputs`).

    `after`: positions, in the same list of instructions, of those that must have ended before: they write
    what this one reads, or read what it overwrites. `time_s`: predicted seconds (0 for what only keeps or
    drops; of a loop, all its rounds).
    """

    op: Literal[
        "call",
        "await",
        "transfer",
        "weights",
        "recall",
        "carry",
        "loop",
        "onload",
        "offload",
        "release",
        "free",
    ]
    target: str
    devices: tuple[int, ...]
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])
    edge: int | None = None
    after: tuple[int, ...] = ()
    lag: int = 0
    init: float = 0.0
    every: int = 0
    body: tuple[Instruction, ...] = ()
    time_s: float = 0.0
    lends: bool = False


@dataclass(frozen=True)
class Program:
    """What every worker walks through: edges, and instructions in an order all workers share."""

    graph: Graph
    edges: tuple[EdgePlan, ...]
    instructions: tuple[Instruction, ...]

    def lending_edge(self, reader: str) -> EdgePlan:
        """The edge over which weights come to node `reader` from a trainer that lends their memory.

        Raises:
            StopIteration: none does.
        """
        moves = (i.edge for i in self.instructions if i.op == "weights" and i.target == reader and i.lends)
        return next(self.edges[number] for number in moves if number is not None)
