"""A device's part of a checkpoint: what it writes of the run's state, and what it reads back.

Every worker takes its part between two of its own steps. No message crosses such a cut, since what one
worker sends in a step another receives in the same step; so workers need not wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.plan.frozen import moved_parameters
from hflow.plan.layout import Box
from hflow.plan.plan import Plan
from hflow.plan.ports import output_layout
from hflow.plan.run_state import (
    DATA_STATE,
    AverageTensor,
    CarriedRows,
    CountTensor,
    OlderTensor,
    OlderWeights,
    StateTensor,
    TrainedTensor,
    WorkerTensor,
    frozen_parameters,
    is_split,
    older_parts_to_write,
    older_weights,
    parts_to_write,
    reader_of,
    run_state,
    trained_models,
    trainer_of,
)
from hflow.plan.samples import sampled_rows
from hflow.runtime.checkpoint.manifest import damaged
from hflow.runtime.checkpoint.reader import CheckpointReader
from hflow.runtime.engines.protocol import ModelEngine, Weights
from hflow.runtime.worker.interpreter import Interpreter


@dataclass(frozen=True)
class StatePart:
    """A box of a tensor of the state, with its values on the host; `shape`: of the whole tensor."""

    state: StateTensor
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def capture(interpreter: Interpreter) -> list[StatePart]:
    """Copies of all that this device writes."""
    with _readable(_older_readers(interpreter)), _one_thread():
        return list(_parts(interpreter))


def restore(interpreter: Interpreter, reader: CheckpointReader) -> None:
    """Set the state of this device from a checkpoint. Collective over the world.

    Readers of older weights get them as in a step: these are put where the newest belong, and sent.

    Raises:
        HflowError: HF412 when it cannot be read.
    """
    plan, rank = interpreter.plan, interpreter.world.rank
    reader.expect(run_state(plan))
    reader.verify(rank, interpreter.world.size)
    for older in older_weights(plan):
        if f"{older.prefix}version" in reader:
            _restore_older(interpreter, reader, older)
    for model in trained_models(plan.graph):
        _restore_trained(interpreter, reader, model)
    _restore_averages(interpreter, reader)
    try:
        _restore_worker(interpreter, reader)
    except ValueError as error:
        raise damaged(reader.folder, str(error)) from None


def _restore_worker(interpreter: Interpreter, reader: CheckpointReader) -> None:
    """What is remembered beside models. Raises ValueError where it does not fit together."""
    plan, rank = interpreter.plan, interpreter.world.rank
    here = [t for t in run_state(plan) if rank in t.devices and t.name in reader]
    boxes = {t.name: box for t in here if isinstance(t, CarriedRows) and (box := _rows_here(plan, t, rank))}
    drawing = [t for t in here if t.name.startswith(f"{DATA_STATE}/")]
    names = [t.name for t in here if isinstance(t, WorkerTensor) and t not in drawing]

    def read(name: str) -> Tensor:
        if name not in boxes:
            return reader.whole(name)
        return reader.read(name, ((0, reader.shape(name)[0]), boxes[name]))

    interpreter.state.restore(iter((*names, *boxes)), read)
    for owner in dict.fromkeys(t.owner for t in drawing):
        kept = {t.name.rpartition("/")[2]: reader.whole(t.name) for t in drawing if t.owner == owner}
        interpreter.engines.python.restore(plan.graph.node(owner), kept)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that meet after each of many small copies cost more than they bring; where others need the
    cores, many times as much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _older_readers(interpreter: Interpreter) -> list[ModelEngine]:
    """What holds older weights here."""
    readers = {reader_of(interpreter.plan, older) for older in older_weights(interpreter.plan)}
    return [engine for instance, engine in interpreter.engines.models.items() if instance in readers]


@contextmanager
def _readable(models: Sequence[ModelEngine]) -> Iterator[None]:
    """Weights that wait in the host's memory are on their device meanwhile."""
    away = [model for model in models if not model.weights.present]
    for model in away:
        model.onload()
    yield
    for model in away:
        model.offload()


def _parts(interpreter: Interpreter) -> Iterator[StatePart]:
    kept, rank = interpreter.state.tensors(), interpreter.world.rank
    kept |= dict(interpreter.engines.python.state())
    for state in run_state(interpreter.plan):
        if rank not in state.devices:
            continue
        match state:
            case TrainedTensor():
                yield from _trained_parts(interpreter, state)
            case OlderTensor():
                yield from _older_parts(interpreter, state)
            case AverageTensor():
                yield from _average_parts(interpreter, state)
            case CountTensor() if rank == state.devices[0]:
                yield _whole(state, torch.tensor(_count(interpreter, state)))
            case CarriedRows() if state.name in kept:
                yield from _carried_parts(interpreter, state, kept[state.name])
            case WorkerTensor() if rank == state.devices[0] and state.name in kept:
                yield _whole(state, kept[state.name].clone())
            case _:
                pass


def _trained_parts(interpreter: Interpreter, state: TrainedTensor) -> Iterator[StatePart]:
    plan, name = interpreter.plan, state.parameter.name
    splits = is_split(plan, state.owner) and name not in frozen_parameters(plan, state.owner)
    box = parts_to_write(plan, state.owner, interpreter.world.rank, splits).get(name)
    training = interpreter.engines.models[trainer_of(plan, state.owner)].training
    assert training
    for part, values in training.parts(state.kind, name, box) if box else ():
        yield StatePart(state, state.parameter.shape, part, values)


def _average_parts(interpreter: Interpreter, state: AverageTensor) -> Iterator[StatePart]:
    plan, rank = interpreter.plan, interpreter.world.rank
    average = interpreter.engines.models[trainer_of(plan, state.owner)].averages[state.reader]
    if state.parameter is None:
        if rank == state.devices[0] and average.version:
            yield _whole(state, torch.tensor(average.version))
        return
    name, shape = state.parameter.name, state.parameter.shape
    if box := parts_to_write(plan, state.owner, rank).get(name):
        yield StatePart(state, shape, box, _copy_of(average, name, box))


def _older_parts(interpreter: Interpreter, state: OlderTensor) -> Iterator[StatePart]:
    plan, rank = interpreter.plan, interpreter.world.rank
    reader = interpreter.engines.models[reader_of(plan, state.older)]
    if not reader.weights.version:
        return
    if state.parameter is None:
        if rank == state.devices[0]:
            yield _whole(state, torch.tensor(reader.weights.version))
        return
    name, shape = state.parameter.name, state.parameter.shape
    if box := older_parts_to_write(plan, state.older, rank).get(name):
        yield StatePart(state, shape, box, _copy_of(reader.weights, name, box))


def _carried_parts(interpreter: Interpreter, state: CarriedRows, kept: Tensor) -> Iterator[StatePart]:
    """Devices that have the same rows let the first of them write."""
    found = sampled_rows(interpreter.plan, state.value).get(interpreter.world.rank)
    if found is None:
        return
    steps, (whole,) = len(kept) // (found[1] - found[0]), state.shape[1:]
    assert whole is not None
    values = kept.reshape(steps, -1).clone()
    yield StatePart(state, (steps, whole), ((0, steps), found), values.cpu())


def _rows_here(plan: Plan, state: CarriedRows, rank: int) -> tuple[int, int] | None:
    """The rows of a value that a device has."""
    node = plan.graph.node(state.value.node)
    type_ = node.type_of(state.value.port)
    boxes = output_layout(node, plan.node(node.name).mesh, type_).boxes((type_.rows,))
    return boxes[rank][0] if rank in boxes else None


def _copy_of(weights: Weights, name: str, box: Box) -> Tensor:
    """The values in `box`, which may cut through what an engine keeps together."""
    held = weights.box(name)
    whole = weights.view(name, held).detach().reshape([stop - start for start, stop in held])
    inside = tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(box, held))
    return whole[inside].to("cpu", copy=True)


def _whole(state: StateTensor, values: Tensor) -> StatePart:
    shape = tuple(values.shape)
    return StatePart(state, shape, tuple((0, size) for size in shape), values.cpu())


def _count(interpreter: Interpreter, state: CountTensor) -> int:
    model = interpreter.engines.models[trainer_of(interpreter.plan, state.owner)]
    assert model.training
    return model.training.updates if state.kind == "updates" else model.weights.version


def _restore_older(interpreter: Interpreter, reader: CheckpointReader, older: OlderWeights) -> None:
    plan, prefix = interpreter.plan, older.prefix
    weights = interpreter.engines.weights(trainer_of(plan, older.model))
    if weights:
        moved = {parameter.name for parameter in moved_parameters(plan.shapes[older.model])}
        for name in (name for name in weights.names() if name in moved):
            _write(weights, name, reader.read(prefix + name, weights.box(name)))
        weights.version = int(reader.whole(f"{prefix}version"))
    interpreter.weights.send_again(older)


def _write(weights: Weights, name: str, values: Tensor) -> None:
    view = weights.view(name, weights.box(name))
    view.copy_(values.reshape(view.shape))
    weights.changed = True


def _restore_averages(interpreter: Interpreter, reader: CheckpointReader) -> None:
    """The models that take them over get them as in a step."""
    plan = interpreter.plan
    for model in trained_models(plan.graph):
        trainer = interpreter.engines.models.get(trainer_of(plan, model))
        for name, average in trainer.averages.items() if trainer else ():
            prefix = f"models/{model}/average/{name}/"
            for parameter in average.names():
                _write(average, parameter, reader.read(prefix + parameter, average.box(parameter)))
            if f"{prefix}version" in reader:
                average.version = int(reader.whole(f"{prefix}version"))
    interpreter.weights.send_averages()


def _restore_trained(interpreter: Interpreter, reader: CheckpointReader, model: str) -> None:
    trainer = interpreter.engines.models.get(trainer_of(interpreter.plan, model))
    if trainer is None:
        return
    assert trainer.training
    prefix = f"models/{model}"
    trainer.training.restore(
        lambda kind, name, box: reader.read(f"{prefix}/{kind}/{name}", box),
        int(reader.whole(f"{prefix}/updates")),
    )
    trainer.weights.version = int(reader.whole(f"{prefix}/version"))
