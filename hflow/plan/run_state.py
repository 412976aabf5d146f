"""What a run carries from one step to the next: a list of named tensors that follows from the plan alone.

Whoever keeps something between steps names it here. A checkpoint holds these tensors and nothing else. Their
names, dtypes and shapes do not depend on who computes what, so that a run goes on under any plan of its
graph. What a step draws (rows, noise, learning rates) is a function of seed, step number and this state.

Names: ``models/actor/weights/PARAMETER`` for tensors of a model, ``carried/NODE.PORT`` for loop-carried
values, ``regions/NAME/…`` for regions of rows, ``data/NODE/…`` for what decides which rows are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from hflow.graph.ir import Graph, Node, Ref
from hflow.graph.row_sources import streaming, success_curriculum
from hflow.graph.types import DType
from hflow.plan.edges import WeightEdge
from hflow.plan.frozen import averaging, frozen_names, moved_parameters, trained_with
from hflow.plan.layout import Box, cut, volume
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import Parameter, parameters, weight_boxes
from hflow.plan.plan import Plan
from hflow.plan.program import Carry, Loop, SyncWeights, with_bodies
from hflow.plan.replicas import Instance, instance_of
from hflow.plan.sharding import Sharding

TrainedKind = Literal["weights", "exp_avg", "exp_avg_sq"]
DATA_STATE = "data"  # begins the names of what decides which rows are drawn
TRAINED: tuple[TrainedKind, ...] = ("weights", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state.

    Attributes:
        name: unique in the run.
        dtype: as in the types of values.
        shape: None for a size that differs from step to step.
        owner: the model, node or region whose state it is.
        devices: those that hold it, or a part of it.
        optional: whether there may be none, as before the first time that something is kept.
    """

    name: str
    dtype: DType | Literal["i64"]
    shape: tuple[int | None, ...]
    owner: str
    devices: tuple[int, ...]
    optional: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class TrainedTensor(StateTensor):
    """Of a parameter of a trained model: its float32 weights, or one of Adam's moments."""

    kind: TrainedKind
    parameter: Parameter


@dataclass(frozen=True)
class CountTensor(StateTensor):
    """A number of a trained model: of updates that its optimizer has made, or of steps that trained it."""

    kind: Literal["updates", "version"]


@dataclass(frozen=True)
class AverageTensor(StateTensor):
    """A parameter of a moving average, in float32, of a model's trained weights, which `reader` takes over;
    None for the version of the weights that it took in last."""

    reader: str
    parameter: Parameter | None


@dataclass(frozen=True)
class OlderTensor(StateTensor):
    """A parameter of older weights; None for their version."""

    older: OlderWeights
    parameter: Parameter | None


@dataclass(frozen=True)
class WorkerTensor(StateTensor):
    """What workers remember beside models, alike on all `devices`."""


@dataclass(frozen=True)
class CarriedRows(StateTensor):
    """What workers remember of rows that a node made in earlier steps, ``[steps, rows]``, the oldest first;
    each device its own rows."""

    value: Ref


@dataclass(frozen=True)
class OlderWeights:
    """Weights of a trained `model` that readers hold which are older than the newest: `reader` is the frozen
    model that takes them over every so many steps, or the model itself where its rollouts lag behind."""

    model: str
    reader: str

    @property
    def prefix(self) -> str:
        kind = "lagging" if self.reader == self.model else f"refreshed/{self.reader}"
        return f"models/{self.model}/{kind}/"


def run_state(plan: Plan) -> tuple[StateTensor, ...]:
    """Everything that a run of `plan` carries from step to step."""
    instructions = tuple(with_bodies(plan.step.instructions))
    return (
        *(t for model in trained_models(plan.graph) for t in _trained(plan, model)),
        *(t for model in trained_models(plan.graph) for t in _averages(plan, model)),
        *(t for older in older_weights(plan) for t in _older(plan, older)),
        *(t for i in instructions if isinstance(i, Carry) for t in _carried(i, plan.graph)),
        *(t for i in instructions if isinstance(i, Loop) for t in _collected(i, plan.graph)),
        *(t for n in plan.graph.nodes if n.op == "data" for t in _drawn_by(n, plan)),
    )


def trained_models(graph: Graph) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n.model_use.model for n in graph.nodes if n.op == "train"))


def trainer_of(plan: Plan, model: str) -> Instance:
    """The weights that are trained."""
    node = plan.graph.trainers(model)[0]
    return instance_of(node, plan.node(node.name).sharding)


def older_weights(plan: Plan) -> tuple[OlderWeights, ...]:
    """All older weights that readers hold from step to step."""
    return tuple(dict.fromkeys(older_edges(plan).values()))


def older_edges(plan: Plan) -> dict[int, OlderWeights]:
    """The weight edges of the step, by number, whose readers keep what they got beyond the step."""
    return {
        instruction.edge: _left_by(plan, instruction)
        for instruction in with_bodies(plan.step.instructions)
        if isinstance(instruction, SyncWeights) and _is_kept(plan, instruction)
    }


def reader_of(plan: Plan, older: OlderWeights) -> Instance:
    """The copy of older weights from which a checkpoint takes them: that of the first of their readers."""
    edge = plan.step.edges[next(number for number, left in older_edges(plan).items() if left == older)]
    assert isinstance(edge, WeightEdge)
    return instance_of(plan.graph.node(edge.target), edge.target_sharding)


def _is_kept(plan: Plan, sync: SyncWeights) -> bool:
    """A reader of an average has nothing that its trainer has not."""
    reader = plan.graph.node(plan.step.weight_edge(sync).target)
    is_refreshed = sync.every > 0 and not is_average(plan.graph, plan.step.weight_edge(sync))
    return is_refreshed or reader.model_use.lag > 0


def is_average(graph: Graph, edge: WeightEdge) -> bool:
    """Whether a moving average of trained weights moves over an edge, instead of the weights."""
    refresh = graph.model_of(graph.node(edge.target)).refresh
    return refresh is not None and refresh.is_average


def _left_by(plan: Plan, sync: SyncWeights) -> OlderWeights:
    edge = plan.step.weight_edge(sync)
    source, reader = plan.graph.node(edge.source), plan.graph.node(edge.target)
    return OlderWeights(source.model_use.model, reader.model_use.model)


def frozen_parameters(plan: Plan, model: str) -> frozenset[str]:
    """The parameters of a trained model that its training leaves as they are."""
    return frozen_names(plan.shapes[model], trained_with(plan.graph, model).freeze)


def parts_to_write(plan: Plan, model: str, device: int, splits: bool = False) -> Mapping[str, Box]:
    """Which box of each parameter of a trained model a device writes to a checkpoint, so that each element is
    written once. Devices that hold the same share the writing by rows.

    Args:
        splits: the state of an optimizer that is split over data-parallel ranks (ZeRO-1): those of one such
            group write of the whole box what is theirs.
    """
    return _boxes_to_write(plan.shapes[model], trainer_of(plan, model), device, splits)


def older_parts_to_write(plan: Plan, older: OlderWeights, device: int) -> Mapping[str, Box]:
    """As `parts_to_write`, of older weights."""
    return _boxes_to_write(plan.shapes[older.model], reader_of(plan, older), device, splits=False)


def is_split(plan: Plan, model: str) -> bool:
    """Whether the state of the model's optimizer is split over data-parallel ranks."""
    return plan.node(plan.graph.trainers(model)[0].name).strategy.zero == 1


@lru_cache(maxsize=64)
def _boxes_to_write(shape: ModelShape, holder: Instance, device: int, splits: bool) -> Mapping[str, Box]:
    boxes = {p.name: _writers(shape, holder, p, splits).get(device) for p in parameters(shape)}
    return {name: box for name, box in boxes.items() if box and volume(box)}


def _writers(shape: ModelShape, holder: Instance, parameter: Parameter, splits: bool) -> dict[int, Box]:
    """The box of a parameter that each device writes."""
    found: dict[int, Box] = {}
    boxes = weight_boxes(shape, holder.sharding, parameter)
    for box in dict.fromkeys(boxes.values()):
        holders = sorted(device for device, held in boxes.items() if held == box)
        if splits:
            found |= dict.fromkeys(_first_group(holder.sharding, parameter, holders), box)
        else:
            found |= {device: cut(box, 0, len(holders), i) for i, device in enumerate(holders)}
    return found


def _first_group(trained: Sharding, parameter: Parameter, holders: list[int]) -> tuple[int, ...]:
    """The data-parallel ranks among which the first holder's state of a parameter is split."""
    groups = trained.mesh.groups("dp", "cp") if parameter.expert is None else trained.expert_replicas
    return next(group for group in groups if holders[0] in group)


def _trained(plan: Plan, model: str) -> Iterator[StateTensor]:
    devices, prefix = trainer_of(plan, model).mesh.devices, f"models/{model}/"
    frozen = frozen_parameters(plan, model)
    for parameter in moved_parameters(plan.shapes[model]):
        for kind in TRAINED[:1] if parameter.name in frozen else TRAINED:
            name = f"{prefix}{kind}/{parameter.name}"
            yield TrainedTensor(name, "f32", parameter.shape, model, devices, kind, parameter)
    yield CountTensor(f"{prefix}updates", "i64", (), model, devices, "updates")
    yield CountTensor(f"{prefix}version", "i64", (), model, devices, "version")


def _averages(plan: Plan, model: str) -> Iterator[StateTensor]:
    """No version before the first step of training has come to them."""
    devices = trainer_of(plan, model).mesh.devices
    for reader in averaging(plan.graph, model):
        for parameter in parameters(plan.shapes[model]):
            name = f"models/{model}/average/{reader}/{parameter.name}"
            yield AverageTensor(name, "f32", parameter.shape, model, devices, reader, parameter)
        version = f"models/{model}/average/{reader}/version"
        yield AverageTensor(version, "i64", (), model, devices, reader, None, optional=True)


def _older(plan: Plan, older: OlderWeights) -> Iterator[StateTensor]:
    """None before the first step of training has come to them: until then they are those in the folder."""
    dtype, devices = plan.graph.model(older.model).weight_dtype, reader_of(plan, older).mesh.devices
    for parameter in moved_parameters(plan.shapes[older.model]):
        name = older.prefix + parameter.name
        yield OlderTensor(name, dtype, parameter.shape, older.model, devices, older, parameter, optional=True)
    yield OlderTensor(f"{older.prefix}version", "i64", (), older.model, devices, older, None, optional=True)


def _carried(carry: Carry, graph: Graph) -> Iterator[StateTensor]:
    """The last values, the oldest first."""
    for port in carry.inputs:
        type_, name = graph.node(carry.node).type_of(port), f"carried/{carry.node}.{port}"
        if type_.scalar:
            yield WorkerTensor(name, "f32", (None,), carry.node, carry.devices)
        else:
            shape = (None, type_.rows)
            yield CarriedRows(name, type_.dtype, shape, carry.node, carry.devices, Ref(carry.node, port))


def _drawn_by(node: Node, plan: Plan) -> Iterator[StateTensor]:
    """Of streamed rows: how far they have been drawn. Of a curriculum by success: tries and successes of each
    row to train on, and the rows of the last steps, which wait to be counted; none before the first step."""
    prefix, devices = f"{DATA_STATE}/{node.name}", plan.node(node.name).mesh.devices
    if streaming(node.options):  # none in a checkpoint of before they were streamed
        yield WorkerTensor(f"{prefix}/position", "i64", (None,), node.name, devices, optional=True)
    if success_curriculum(node.options) is None:
        return
    for name in ("tries", "successes"):
        yield WorkerTensor(f"{prefix}/{name}", "f32", (None,), node.name, devices, optional=True)
    shape = (None, node.options["batch"])
    yield WorkerTensor(f"{prefix}/drawn", "i64", shape, node.name, devices, optional=True)


def _collected(loop: Loop, graph: Graph) -> Iterator[StateTensor]:
    """How many rounds a region has run; the rows that wait for the next step, and for how many steps each
    prompt has."""
    prefix, name, devices = f"regions/{loop.node}/", loop.node, loop.devices
    yield WorkerTensor(f"{prefix}rounds", "i64", (), name, devices)
    if not graph.region(name).max_age:
        return
    yield WorkerTensor(f"{prefix}waited", "i64", (None,), name, devices, optional=True)
    for output in graph.node(name).outputs:
        port = f"{prefix}waiting/{output.port}/"
        yield WorkerTensor(f"{port}values", output.type.dtype, (None,), name, devices, optional=True)
        for part in ("lengths", "versions"):
            yield WorkerTensor(port + part, "i64", (None,), name, devices, optional=True)
