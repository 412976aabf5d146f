"""Adapters that are read from folders, as PEFT and hflow's own exports write them.

Config and heads of tensors are read when a graph is compiled, and again where the matrices are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from hflow.bounded_read import UnreadableError
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.adapter import Adapter, StoredAdapter
from hflow.graph.ir import Graph, Model
from hflow.plan.adapter_config import read_adapter_config
from hflow.plan.digests import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hflow.plan.frozen import unadaptable
from hflow.plan.model_config import ConfigError
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import LORA_A, LORA_B, SCALAR_HEAD, parameters
from hflow.plan.tensor_heads import TensorHead, read_heads

PEFT_PREFIX = "base_model.model."  # of the names of all tensors
_FLOATS = ("F64", "F32", "F16", "BF16")


def resolved_adapter(model: Model) -> Adapter | None:
    """The adapter of a model; one that lies in a folder as its config says.

    Raises:
        HflowError: HF230 when that cannot be read, is none of hflow's, or is not what the graph says of it.
    """
    said = model.adapter
    if not isinstance(said, StoredAdapter):
        return said
    file = Path(said.path) / ADAPTER_CONFIG
    try:
        found = read_adapter_config(Path(said.path), said.dropout)
    except UnreadableError as error:
        missing = error.reason == "missing"
        problem = f"no file `{file}`" if missing else f"`{file}` cannot be read: {error}"
        help_ = "`adapter.path` is a local folder, as PEFT's `save_pretrained` writes it" if missing else ""
        raise HflowError(
            Diagnostic("HF230", f"adapter of `{model.name}`: {problem}", model.span, help_)
        ) from None
    except ConfigError as error:
        raise HflowError(Diagnostic("HF230", f"`{file}`: {error}", model.span)) from None
    for key in ("rank", "alpha", "targets"):
        own, its = getattr(said, key), getattr(found, key)
        if own is not None and own != its:
            message = f"`{model.name}` says `adapter.{key}` {_text(own)}, `{file}` {_text(its)}"
            raise HflowError(Diagnostic("HF230", message, model.span, f"leave out `{key}`"))
    return found


def unfit_adapters(graph: Graph, shapes: Mapping[str, ModelShape]) -> Iterator[Diagnostic]:
    """HF230 for every stored adapter whose tensors are not those of its model."""
    for model in graph.models:
        if isinstance(model.adapter, StoredAdapter) and not unadaptable(shapes[model.name]):
            _, problem, help_ = stored_heads(model.adapter, shapes[model.name])
            if problem:
                yield Diagnostic("HF230", f"adapter of `{model.name}`: {problem}", model.span, help_)


def stored_heads(adapter: StoredAdapter, shape: ModelShape) -> tuple[dict[str, TensorHead], str, str]:
    """What lies in the folder of an adapter, by the name of the parameter: A and B of all matrices that it
    changes, and a scalar head, if it has one. Also a problem and help, empty if all is well."""
    file = Path(adapter.path) / ADAPTER_WEIGHTS
    try:
        heads = read_heads(file)
    except UnreadableError as error:
        help_ = "matrices are read from safetensors alone" if error.reason == "missing" else ""
        problem = f"no file `{file}`" if error.reason == "missing" else f"`{file}` cannot be read: {error}"
        return {}, problem, help_
    problem, help_ = _misfit(heads, shape)
    found = {name.removeprefix(PEFT_PREFIX): head for name, head in heads.items()}
    return found, problem and f"`{file}`: {problem}", help_


def _misfit(heads: Mapping[str, TensorHead], shape: ModelShape) -> tuple[str, str]:
    wanted = {PEFT_PREFIX + p.name: p.shape for p in parameters(shape) if p.name.endswith((LORA_A, LORA_B))}
    head = PEFT_PREFIX + SCALAR_HEAD
    if head in heads and shape.head != "scalar":
        return f"there is a scalar head, `{head}`, and the model predicts tokens", "write `head: scalar`"
    own = wanted | ({head: (1, shape.hidden)} if head in heads else {})
    if missing := next((name for name in own if name not in heads), None):
        return f"there is no tensor `{missing}`", "every layer has the adapter's `target_modules`"
    if foreign := next((name for name in heads if name not in own), None):
        return f"tensor `{foreign}` belongs to nothing in the model", "its base must be the model's `path`"
    for name, expected in own.items():
        dtype, found = heads[name].dtype, heads[name].shape
        if dtype not in _FLOATS:
            return f"tensor `{name}` is {dtype}; weights are one of {', '.join(_FLOATS)}", ""
        if found != expected:
            help_ = "a reward model has one label" if name == head else "its base must be the model's `path`"
            return f"tensor `{name}` has shape {found}, the model needs {expected}", help_
    return "", ""


def _text(value: object) -> str:
    return ", ".join(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else f"{value}"
