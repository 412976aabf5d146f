"""The matrices of an adapter in a folder, as PEFT and hflow's own exports write it."""

from __future__ import annotations

from pathlib import Path

from hflow.graph.adapter import StoredAdapter
from hflow.graph.ir import Model
from hflow.plan.digests import ADAPTER_WEIGHTS
from hflow.plan.model_shape import ModelShape
from hflow.plan.stored_adapter import PEFT_PREFIX, stored_heads
from hflow.runtime.model_folder import check_files, unusable
from hflow.runtime.weight_files import StoredTensor


def adapter_tensors(model: Model, shape: ModelShape) -> dict[str, StoredTensor]:
    """What lies in the folder of the model's adapter, by the name of the parameter: A and B of all matrices,
    and a scalar head, if one was saved; nothing for a model whose adapter begins anew, or that has none.

    Raises:
        HflowError: HF406 when the file cannot be read, or has other tensors than the model's adapter.
    """
    if not isinstance(model.adapter, StoredAdapter):
        return {}
    folder = Path(model.adapter.path)
    check_files(folder)
    heads, problem, help_ = stored_heads(model.adapter, shape)
    if problem:
        raise unusable(folder, problem, help_, model.span)
    file = folder / ADAPTER_WEIGHTS
    return {name: StoredTensor(file, PEFT_PREFIX + name, h.dtype, h.shape) for name, h in heads.items()}
