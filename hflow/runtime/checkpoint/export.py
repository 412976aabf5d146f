"""A Hugging Face folder from a checkpoint, without workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from torch import Tensor

from hflow.graph.ir import Model
from hflow.plan.frozen import moved_parameters
from hflow.plan.model_shape import ModelShape
from hflow.plan.origin import origin_files
from hflow.plan.parameters import parameters
from hflow.plan.plan import Plan
from hflow.plan.run_state import run_state
from hflow.runtime.adapter_export import adapter_export
from hflow.runtime.checkpoint.reader import CheckpointReader
from hflow.runtime.exported_template import exported_template
from hflow.runtime.hf import write_hf
from hflow.runtime.rows import TORCH_DTYPES
from hflow.runtime.weight_files import read_tensor, stored_tensors


def export_checkpoint(plan: Plan, checkpoint: Path, folders: Mapping[str, Path]) -> None:
    """Write trained models of `plan` as they were when the checkpoint was taken, in each model's dtype.

    Args:
        folders: where each of them goes, by name; what is there is replaced.

    Raises:
        HflowError: HF412 when the checkpoint cannot be used, HF406 when a folder cannot be written or
            the chat template not be read.
    """
    with closing(CheckpointReader(checkpoint)) as reader:
        reader.expect(run_state(plan))
        reader.verify(0, 1)
        more = {**origin_files(plan), **exported_template(plan.graph)}
        for name, folder in folders.items():
            model, shape = plan.graph.model(name), plan.shapes[name]
            tensors = _tensors(model, shape, reader)
            write_hf(folder, Path(model.path), tensors, adapter_export(model, shape), more)


def _tensors(model: Model, shape: ModelShape, reader: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
    """What an adapter leaves as it is comes from the model's folder."""
    dtype, moved = TORCH_DTYPES[model.weight_dtype], {p.name for p in moved_parameters(shape)}
    stored = stored_tensors(model, shape.base) if shape.adapter else {}
    for name in (parameter.name for parameter in parameters(shape)):
        if name in moved:
            yield name, reader.whole(f"models/{model.name}/weights/{name}").to(dtype)
        else:
            yield name, read_tensor(stored[name]).to(dtype)
