"""A Hugging Face folder from a checkpoint, without workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from torch import Tensor

from hflow.plan.parameters import parameters
from hflow.plan.plan import Plan
from hflow.plan.run_state import run_state
from hflow.runtime.checkpoint.reader import CheckpointReader
from hflow.runtime.hf import write_hf
from hflow.runtime.rows import TORCH_DTYPES


def export_checkpoint(plan: Plan, checkpoint: Path, folders: Mapping[str, Path]) -> None:
    """Write trained models of `plan` as they were when the checkpoint was taken, in each model's dtype.

    Args:
        folders: where each of them goes, by name; what is there is replaced.

    Raises:
        HflowError: HF412 when the checkpoint cannot be used, HF406 when a folder cannot be written.
    """
    with closing(CheckpointReader(checkpoint)) as reader:
        reader.expect(run_state(plan))
        reader.verify(0, 1)
        for model, folder in folders.items():
            write_hf(folder, Path(plan.graph.model(model).path), _tensors(plan, model, reader))


def _tensors(plan: Plan, model: str, reader: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
    dtype = TORCH_DTYPES[plan.graph.model(model).dtype]
    for parameter in parameters(plan.shapes[model]):
        yield parameter.name, reader.whole(f"models/{model}/weights/{parameter.name}").to(dtype)
