"""`call` nodes: a typed Python function on the local rows.

The function sees plain tensors and lists. A signature decides their form: a dense value is a tensor
``[rows]``, a ragged one a right-padded tensor ``[rows, longest]``, a scalar one without dims, strings are
lists; a dim written as a product, ``prompts*group``, arrives as two dims, so that a function over groups
is a function over the last axis. What it returns has the form that its signature gives the outputs.

A function may write into what it gets and return it: its tensors are copies, and so are its outputs. Other
nodes read the same rows, and which of them lie on the same device is the plan's choice.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from hflow.diagnostics import HflowError
from hflow.graph.infer.signature import parse_signature
from hflow.graph.ir import Function, Node
from hflow.graph.types import Dim, ValueType
from hflow.runtime.engines.arguments import group_sizes
from hflow.runtime.engines.protocol import EngineCall, NodeError, Result
from hflow.runtime.functions import describe_failure, load_function
from hflow.runtime.rows import TORCH_DTYPES, Rows, from_padded, from_strings, row_of


@dataclass
class Bound:
    """Sizes of a signature's dim names on this device, and lengths of its ragged dims."""

    sizes: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, Tensor] = field(default_factory=dict)


def run_call(call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
    """Run the node's function on the local rows of its inputs.

    Metrics: the mean of every ``f32[rows]`` output and every ``f32[]``, under the port's name.

    Raises:
        NodeError: when it raises, or returns values that are not of the declared types; HF205 when it cannot
            be imported, HF405 naming the row when it returns a number that is not finite. With the traceback.
    """
    node, function = call.node, call.node.function
    assert function is not None
    signature = parse_signature(function.signature)
    bound = Bound()
    arguments = {
        port.name: _deliver(node, port.name, port.type, inputs[port.name], bound)
        for port in signature.inputs
        if port.name in inputs
    }
    returned = _invoke(node, function, arguments)
    ports = [port.name for port in signature.outputs]
    values = (returned,) if len(ports) == 1 else returned
    if not isinstance(values, tuple) or len(values) != len(ports):
        message = f"`{function.reference}` returned {_kind(returned)}, not a tuple of {', '.join(ports)}"
        raise NodeError(node.name, message)
    outputs = {
        port.name: _collect(node, port.name, port.type, value, bound)
        for port, value in zip(signature.outputs, values)
    }
    for port, rows in outputs.items():
        _check_finite(call, port, rows)
    return Result(outputs, _means(node, outputs))


def _invoke(node: Node, function: Function, arguments: Mapping[str, Any]) -> Any:
    options = {name: value for name, value in node.options.items() if name in function.options}
    try:
        loaded = load_function(function.reference)
    except HflowError as error:
        raise NodeError(node.name, error.diagnostics[0].message, error.diagnostics[0].code) from error
    try:
        with torch.no_grad():
            return loaded(**arguments, **options)
    except (Exception, SystemExit) as error:  # whatever a user's function raises is this node's failure
        problem = f"`{function.reference}` failed: {describe_failure(loaded, error)}"
        trace = "".join(traceback.format_exception(error))
        raise NodeError(node.name, problem, trace=trace) from error


def _deliver(node: Node, port: str, pattern: ValueType, rows: Rows, bound: Bound) -> Tensor | list[Any]:
    """One input in the form the function expects, its own to write into; notes what its dims are bound to."""
    source = node.input(port)
    assert source is not None
    if pattern.scalar:
        return _copy(rows.values.reshape(()))
    shape = _split_rows(source.type, pattern.dims[0], len(rows))
    bound.sizes.update(zip(_row_names(pattern), shape))
    if pattern.dtype == "str":
        return _nest(rows.strings(), shape)
    if rows.lengths is None:
        inner = rows.values.shape[1:]
        bound.sizes.update(zip(map(_dim_name, pattern.dims[1:]), inner))
        return _copy(rows.values.reshape(*shape, *inner))
    padded = rows.padded()  # a new tensor
    bound.sizes[_dim_name(pattern.dims[-1])] = padded.shape[1]
    bound.lengths[_dim_name(pattern.dims[-1])] = rows.lengths
    return padded.reshape(*shape, padded.shape[1])


def _split_rows(actual: ValueType, rows: Dim, num_rows: int) -> tuple[int, ...]:
    """`num_rows` as one size per factor of the pattern's dim `rows`."""
    inner = group_sizes(actual, rows)
    return (num_rows // prod(inner), *inner)


def _row_names(pattern: ValueType) -> list[str]:
    return [] if pattern.scalar else [factor.name for factor in pattern.dims[0].factors]


def _dim_name(dim: Dim) -> str:
    """The name under which a dim is bound: ``resp~`` for ``resp~?`` too."""
    return str(dim).removesuffix("?")


def _nest(flat: list[Any], shape: Sequence[int]) -> list[Any]:
    """`flat` as nested lists of `shape`."""
    for size in reversed(shape[1:]):
        flat = [flat[i : i + size] for i in range(0, len(flat), size)]
    return flat


def _collect(node: Node, port: str, pattern: ValueType, value: Any, bound: Bound) -> Rows:
    """One returned value as rows of its declared type, in memory of their own."""
    names = [*_row_names(pattern), *map(_dim_name, pattern.dims[1:])]
    shape = tuple(bound.sizes[name] for name in names)
    if pattern.dtype == "str":
        return from_strings(_flatten(node, port, value, shape))
    tensor = _tensor(node, port, pattern, value)
    if tuple(tensor.shape) != shape:
        expected = ", ".join(f"{name}={size}" for name, size in zip(names, shape))
        raise NodeError(node.name, f"`{port}` has shape {list(tensor.shape)}, declared is [{expected}]")
    if pattern.scalar:
        return Rows(_copy(tensor.reshape(1)))
    if not pattern.ragged:
        return Rows(_copy(tensor.reshape(-1, *shape[len(pattern.dims[0].factors) :])))
    return from_padded(tensor.reshape(-1, shape[-1]), bound.lengths[names[-1]])  # a new tensor


def _copy(tensor: Tensor) -> Tensor:
    """Contiguous, as what a transfer brings is: whether a ``view`` works must not depend on the plan."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _tensor(node: Node, port: str, pattern: ValueType, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NodeError(node.name, f"`{port}` cannot be made a tensor: {error}") from None
    dtype = TORCH_DTYPES[pattern.dtype]
    if not torch.can_cast(tensor.dtype, dtype):
        message = f"`{port}` is of dtype {tensor.dtype}, which {pattern.dtype} cannot hold"
        raise NodeError(node.name, message)
    return tensor.to(dtype)


def _flatten(node: Node, port: str, value: Any, shape: Sequence[int]) -> list[str]:
    """The strings in nested lists of `shape`, in order."""
    if not shape:
        if not isinstance(value, str):
            raise NodeError(node.name, f"`{port}` holds {_kind(value)}, not a string")
        return [value]
    if not isinstance(value, list | tuple) or len(value) != shape[0]:
        message = f"`{port}` is {_kind(value)}, declared is a list of {shape[0]}"
        raise NodeError(node.name, message)
    return [text for part in value for text in _flatten(node, port, part, shape[1:])]


def _check_finite(call: EngineCall, port: str, rows: Rows) -> None:
    """Refuse nan and inf where they arise: training would report them later, and no longer know the row."""
    bad = (~rows.values.isfinite()).nonzero()
    if not len(bad):
        return
    place = bad[0].tolist()
    local = place[0] if rows.lengths is None else row_of(rows.lengths, place[0])
    type_, value = call.node.type_of(port), rows.values[tuple(place)].item()
    where = f"`{port}`" if type_.scalar else f"`{port}` of row {_first_row(call, type_) + local}"
    raise NodeError(call.node.name, f"{call.when}: {where} is {value}", "HF405")


def _first_row(call: EngineCall, output: ValueType) -> int:
    """Global number of this device's first row of an output; groups of rows are whole on a device."""
    read = next((i.type.rows for i in call.node.inputs if not i.type.scalar), 1)
    return call.first_row * output.rows // read


def _means(node: Node, outputs: Mapping[str, Rows]) -> dict[str, tuple[float, float]]:
    scalars = {
        output.port: outputs[output.port].values
        for output in node.outputs
        if output.type.dtype == "f32" and len(output.type.dims) < 2
    }
    return {port: (values.sum().item(), float(len(values))) for port, values in scalars.items()}


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{size}"
