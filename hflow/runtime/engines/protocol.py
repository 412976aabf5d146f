"""What a worker asks of an engine: the whole life of a model on a device.

An engine never imports ray and never talks to the controller. It may use the process groups of its own mesh;
values enter and leave as `Rows` that lie as the plan's layouts say. What an engine is able to do is in its
profile (`hflow.plan.engine_registry`), and a plan asks for nothing else; so a worker calls what the program
says and need not know which engine it has. The base classes here refuse what not every engine can do.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from hflow.graph.ir import Model, Node
from hflow.plan.layout import Box, Range
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import NodePlan
from hflow.plan.run_state import TrainedKind
from hflow.plan.sharding import Sharding
from hflow.runtime.cores import Cores
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.rows import Rows

if TYPE_CHECKING:  # it imports transformers, which a process of functions needs not
    from hflow.runtime.tokenizer import Tokenizer

MetricSums = dict[str, tuple[float, float]]  # (sum, weight) by name, added up over workers


@dataclass(frozen=True)
class EngineCall:
    """One execution of a node in one step.

    `first_row` is the global index of the first row that this device holds of the node's *inputs*
    (for a `data` node: of its batch) and `num_rows` how many it holds; with the run's `seed` and
    `step` they make sampling and data order independent of the plan. In a repeat region `step` counts its
    rounds, over the whole run. `stream` tells the generate nodes of a graph apart, and so its data nodes.
    `steps`: of the whole run, over which schedules of learning rates go. `made`: of a generate node, the
    global numbers of the rows that it makes here; None: all samples of its inputs' rows.
    """

    node: Node
    plan: NodePlan
    first_row: int
    num_rows: int
    seed: int
    step: int
    evaluation: bool = False
    stream: int = 0
    steps: int = 0
    made: Range | None = None

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
    when a node had ended that was begun and waited for, in seconds since the epoch. `numbers`: of a data
    node, which rows of its dataset it has drawn; int64 ``[rows]``."""

    outputs: Mapping[str, Rows] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    digest: int | None = None
    end_s: float | None = None
    numbers: Tensor | None = None


class NodeError(Exception):
    """A node's failure with a cause that a user can read; `code` is a diagnostic code, `trace` the traceback
    of a cause in another process."""

    def __init__(self, node: str, message: str, code: str = "HF401", trace: str = ""):
        super().__init__(message)
        self.node = node
        self.message = message
        self.code = code
        self.trace = trace


class Stopped(Exception):  # noqa: N818  (it is what happened)
    """Nobody waits for the node any more: another worker failed."""


class NodeEngine(Protocol):
    def run(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """Execute the node on the local rows. Collective over the engine's mesh."""
        ...


class Weights(Protocol):
    """The weights of one model on one device, as boxes of HF parameters (`hflow.plan.parameters`).

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


class ModelWeights(ABC):
    """`Weights` of an engine's model: they give their memory back and take it again.

    `version`: how many steps have trained them. `present`: whether they can be read.
    """

    changed: bool
    version: int
    present: bool

    @abstractmethod
    def names(self) -> Sequence[str]:
        """See `Weights`."""

    @abstractmethod
    def box(self, name: str) -> Box:
        """See `Weights`."""

    @abstractmethod
    def view(self, name: str, box: Box) -> Tensor:
        """See `Weights`. Those that are present, and were ever renewed, can be read between steps."""

    @abstractmethod
    def allocate(self, keeps_values: bool = False) -> None:
        """Memory for what is to be written; nothing happens where there is some already. `keeps_values`: only
        a part of it is going to be written, and the rest must be what it was."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back: they are undefined until `allocate`d and written again."""

    def hand_over(self) -> None:  # noqa: B027  (few engines have anything to do)
        """Called after each part of a transfer (`ModelEngine.parts`) has been written. Those that compute
        with the memory that was written have nothing to do."""

    def donate(self) -> None:
        """Give the memory back while a copy is there that holds all of these weights.

        Raises:
            NotImplementedError: by an engine whose profile does not donate.
        """
        raise NotImplementedError(f"{type(self).__name__} do not donate their memory")

    def take_back(self, copy: Weights) -> None:
        """Take the donated memory again, and the values from the copy.

        Raises:
            NotImplementedError: by an engine whose profile does not donate.
        """
        raise NotImplementedError(f"{type(self).__name__} do not donate their memory")


class AveragedWeights(Weights, Protocol):
    """A moving average, in float32, of the weights of a model that is trained here, for a model that takes it
    over. `version`: of the weights that came into it last."""

    version: int

    def advance(self, step: int) -> None:
        """Let the present weights come into it, once in each step of the run."""
        ...


class TrainingState(ABC):
    """What the trainer of a model carries from one update to the next, beside the weights that it computes
    with. Values are float32 and lie on the host."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """How many the optimizer has made."""

    @abstractmethod
    def parts(self, kind: TrainedKind, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """What this rank keeps in `box` (global indices) of an HF parameter, in as many boxes as it takes.
        Values are in the shapes of their boxes, and copies."""

    @abstractmethod
    def restore(self, read: Callable[[TrainedKind, str, Box], Tensor], updates: int) -> None:
        """Set all that this rank keeps, and the weights that it computes with."""


@dataclass(frozen=True)
class ModelSetup:
    """What a plan asks of one copy of a model's weights, for the rank that builds its part.

    `rank`: of this process in the torch.distributed world, which is its device's number in the plan.
    `new_group`: makes (or remembers) the process group of some ranks. `nodes`: those that use the copy, in
    the order of their programs. `averaging`: the models that take over an average of its weights, if it is
    trained. `renewed`: its weights come anew in every step and are released between.
    `server_bytes`: what a server takes of a device before it computes anything (`Cluster`). `cores`: that the
    ranks of this machine may count on. `stopped`: set when nobody waits for results any more. `told`: hears
    what is done while it takes long. `base`: of a model that is trained, or frozen, on the base of another
    one, what trains that one, in the same layout (`Model.base`).
    """

    model: Model
    shape: ModelShape
    sharding: Sharding
    rank: int
    device: torch.device
    tokenizer: Tokenizer
    new_group: NewGroup
    nodes: tuple[tuple[Node, NodePlan], ...]
    renewed: bool
    server_bytes: int
    seed: int
    cores: Mapping[int, Cores]
    stopped: threading.Event
    told: Callable[[str], None]
    averaging: tuple[Model, ...] = ()
    base: ModelEngine | None = None


class ModelEngine(ABC):
    """One copy of a model on one device, and the nodes that use it. `training`: of a model that is trained
    here; `averages`: of its weights, by the name of the model that takes each over."""

    weights: ModelWeights
    training: TrainingState | None = None
    averages: Mapping[str, AveragedWeights] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def build(cls, setup: ModelSetup) -> Self | None:
        """Build this rank's part, with the weights in ``model.path``. Collective over the whole world, since
        every rank takes part in making every process group.

        Returns:
            None on ranks outside the mesh.

        Raises:
            HflowError: HF406 when the weights cannot be read, or the engine is not installed.
        """

    @abstractmethod
    def run(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """Execute a node on this rank's rows, or end it where it was begun. Collective over the replica, of a
        train node over the mesh.

        Raises:
            NodeError: HF401 for inputs that the node cannot work on, or when the plan has not brought back
                what it put away; HF405 for numbers that are not finite.
        """

    def begin(self, call: EngineCall, inputs: Mapping[str, Rows]) -> None:
        """Begin to execute a generate node, which goes on by itself while the worker does other things; `run`
        waits for its end. Weights that come meanwhile serve the rest of every response.

        Raises:
            NodeError: HF401 for inputs that the node cannot work on.
            NotImplementedError: by an engine whose profile has no `in_flight`.
        """
        raise NotImplementedError(f"{call.node.name}: {type(self).__name__} does not go on by itself")

    def evaluator(self) -> ModelEngine:
        """What evaluates the newest weights, of which it has a copy, on the server of this engine. That one
        samples with its own again afterwards. Not collective.

        Raises:
            NotImplementedError: by an engine that has no server.
        """
        raise NotImplementedError(f"{type(self).__name__} has no server")

    def offload(self) -> int:
        """Put what waits for the next call into the host's memory. Returns bytes copied to the host.

        Raises:
            NotImplementedError: by an engine whose profile does not offload.
        """
        raise NotImplementedError(f"{type(self).__name__} is not offloaded")

    def onload(self) -> int:
        """Bring back what `offload` put away. Returns bytes copied to the device.

        Raises:
            NotImplementedError: by an engine whose profile does not offload.
        """
        raise NotImplementedError(f"{type(self).__name__} is not offloaded")

    def close(self) -> None:  # noqa: B027  (few engines have anything to do)
        """End the processes that it has started, if any. Not collective; may be called again, and from
        another thread."""

    @staticmethod
    def parts(shape: ModelShape, tp: int) -> tuple[Sequence[str] | None, ...]:
        """The names of the parameters in each part of a transfer into `weights`; None for all at once. Asked
        also on ranks that only send, so it depends on the model and the target's tp alone."""
        return (None,)
