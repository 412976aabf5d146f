"""What every worker walks through in a step: instructions over handles, in an order that all share.

A handle names rows in a worker's store. There is one class per instruction; `Instruction` is any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, assert_never

from pydantic import ConfigDict, Discriminator

from hflow.graph.ir import Graph
from hflow.plan.edges import DataEdge, Edge, WeightEdge


@dataclass(frozen=True)
class _Instruction:
    """What all instructions have.

    Attributes:
        op: the name of the instruction in plan files, printed programs and events.
        node: the node that it runs, or for which it brings, keeps or drops something.
        devices: those whose workers execute it.
        after: positions, in the same list, of the instructions that must have ended before: they write what
            this one reads, or read what it overwrites.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    op: str = field(kw_only=True)
    node: str
    devices: tuple[int, ...]
    after: tuple[int, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class _TimedInstruction(_Instruction):
    """An instruction for which the schedule reserves its devices.

    Attributes:
        time_s: predicted seconds; of a loop, of all its rounds.
    """

    time_s: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class Call(_TimedInstruction):
    """Run the node; if the same program awaits it, only begin to.

    Attributes:
        inputs: the handle that each input port reads.
        outputs: the handle that each output port writes; none where the node is awaited.
    """

    op: Literal["call"] = field(default="call", kw_only=True)
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Await(_Instruction):
    """Wait until the node, which was called, has ended.

    Attributes:
        outputs: the handle that each output port writes.
    """

    op: Literal["await"] = field(default="await", kw_only=True)
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class Transfer(_TimedInstruction):
    """Move rows over a data edge to the node.

    Attributes:
        edge: the edge's number in the program.
        inputs: for each port of the edge that moves, the handle at the source.
        outputs: for each such port, the handle at the target.
    """

    op: Literal["transfer"] = field(default="transfer", kw_only=True)
    edge: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class SyncWeights(_TimedInstruction):
    """Move weights over a weight edge, into the weights that the node reads.

    Attributes:
        edge: the edge's number in the program.
        every: if not 0, only in steps that are multiples of it, and not in the first.
        donates: after the transfer the trainer frees the memory of its own weights, whose values the reader's
            copy also holds, until the `Release` that has `donates` too.
    """

    op: Literal["weights"] = field(default="weights", kw_only=True)
    edge: int
    every: int = 0
    donates: bool = False


@dataclass(frozen=True)
class Loop(_TimedInstruction):
    """Run the rounds of the region that has the node's name, then store what was collected.

    Attributes:
        body: the instructions of one round, the last of which is the call of the region's own node.
        outputs: the handle that each output port of the region writes.
    """

    op: Literal["loop"] = field(default="loop", kw_only=True)
    body: tuple[Instruction, ...]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class Onload(_TimedInstruction):
    """Bring what the node keeps in the host's memory (`NodePlan.offload`) to the devices."""

    op: Literal["onload"] = field(default="onload", kw_only=True)


@dataclass(frozen=True)
class Offload(_TimedInstruction):
    """Put what the node keeps in the host's memory (`NodePlan.offload`) back there."""

    op: Literal["offload"] = field(default="offload", kw_only=True)


@dataclass(frozen=True)
class Release(_Instruction):
    """Drop the weights that the node reads, of which it has a copy of its own.

    Attributes:
        donates: before the copy is dropped, the trainer allocates its weights again and copies their values
            back from it.
    """

    op: Literal["release"] = field(default="release", kw_only=True)
    donates: bool = False


@dataclass(frozen=True)
class Carry(_Instruction):
    """Keep scalars, or each device its rows, that the node has made, for recalls in later steps.

    Attributes:
        inputs: the handle of each output port that is kept.
        lag: for how many steps.
    """

    op: Literal["carry"] = field(default="carry", kw_only=True)
    inputs: Mapping[str, str]
    lag: int


@dataclass(frozen=True)
class Recall(_Instruction):
    """Put scalars, or each device its rows, that the node made in an earlier step into the store.

    Attributes:
        outputs: the handle that each output port of the node writes.
        lag: how many steps ago they were made.
        init: their value where there was no such step.
    """

    op: Literal["recall"] = field(default="recall", kw_only=True)
    outputs: Mapping[str, str]
    lag: int
    init: float


@dataclass(frozen=True)
class Free(_Instruction):
    """Drop rows from the store, once the node has used them last.

    Attributes:
        handles: those of the rows.
    """

    op: Literal["free"] = field(default="free", kw_only=True)
    handles: tuple[str, ...]


Activity = Call | Transfer | SyncWeights | Onload | Offload  # what computes or moves something
Timed = Activity | Loop
Timeless = Await | Release | Carry | Recall | Free  # each device does these alone, at once
Instruction = Annotated[
    Call | Await | Transfer | SyncWeights | Loop | Onload | Offload | Release | Carry | Recall | Free,
    Discriminator("op"),
]


def handles_read(instruction: Instruction) -> tuple[str, ...]:
    """The handles that an instruction itself reads or drops; a loop's body reads its own."""
    match instruction:
        case Call() | Transfer() | Carry():
            return tuple(instruction.inputs.values())
        case Free():
            return instruction.handles
        case Await() | SyncWeights() | Loop() | Onload() | Offload() | Release() | Recall():
            return ()
        case _:
            assert_never(instruction)


def handles_written(instruction: Instruction) -> tuple[str, ...]:
    """The handles that an instruction itself writes; a loop's body writes its own."""
    match instruction:
        case Call() | Await() | Transfer() | Loop() | Recall():
            return tuple(instruction.outputs.values())
        case SyncWeights() | Onload() | Offload() | Release() | Carry() | Free():
            return ()
        case _:
            assert_never(instruction)


def with_bodies(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """All instructions; after a loop, those of its body."""
    for instruction in instructions:
        yield instruction
        if isinstance(instruction, Loop):
            yield from with_bodies(instruction.body)


@dataclass(frozen=True)
class Program:
    """What every worker walks through: edges, and instructions in an order that all workers share."""

    graph: Graph
    edges: tuple[Edge, ...]
    instructions: tuple[Instruction, ...]

    def data_edge(self, transfer: Transfer) -> DataEdge:
        """The edge over which rows move."""
        edge = self.edges[transfer.edge]
        assert isinstance(edge, DataEdge), transfer
        return edge

    def weight_edge(self, sync: SyncWeights) -> WeightEdge:
        """The edge over which weights move."""
        edge = self.edges[sync.edge]
        assert isinstance(edge, WeightEdge), sync
        return edge

    def at(self, path: Sequence[int]) -> Instruction:
        """The instruction at an index, or of a loop's body at: the loop's index, any round, an index."""
        found = self.instructions[path[0]]
        return found.body[path[2]] if isinstance(found, Loop) and len(path) > 1 else found

    def kind_and_name(self, instruction: Instruction) -> tuple[str, str]:
        """As in events of a run: what is done, and the node, the edge or ``onload NODE``."""
        match instruction:
            case Call() | Await():
                return "call", instruction.node
            case Transfer() | SyncWeights():
                return instruction.op, self.edges[instruction.edge].name
            case Loop() | Onload() | Offload() | Release() | Carry() | Recall() | Free():
                return instruction.op, f"{instruction.op} {instruction.node}"
            case _:
                assert_never(instruction)

    def donating_edge(self, reader: str) -> WeightEdge:
        """The edge over which weights come to node `reader` from a trainer that donates their memory.

        Raises:
            StopIteration: none does.
        """
        moves = (i for i in self.instructions if isinstance(i, SyncWeights))
        return next(self.weight_edge(i) for i in moves if i.node == reader and i.donates)
