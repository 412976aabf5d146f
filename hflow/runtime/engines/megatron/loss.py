"""The loss function of a train node, ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import Tensor

from hflow.graph.infer.signature import Port, parse_signature
from hflow.graph.ir import Node
from hflow.runtime.engines.arguments import group_sizes
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.functions import describe_failure, load_function

Level = Literal["token", "row", "group"]  # what an output has one number of


@dataclass(frozen=True)
class Loss:
    """`function` maps tensors named `inputs` to one tensor per output.

    `computed` are the inputs that the model itself gives. A function over groups of rows sees `group`
    (one size, else none) as a dim of its own: ``[groups, k]`` and ``[groups, k, T]``; what it reads per group
    is ``[groups]``. `aggregate` and
    `temperature` say how losses per token are summed, and at which temperature log-probs are taken.
    """

    node: str
    reference: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    computed: tuple[str, ...]
    options: Mapping[str, Any]
    group: tuple[int, ...]
    aggregate: str
    temperature: float

    @staticmethod
    def of(node: Node) -> Loss:
        """Import the function that `node` names.

        Raises:
            HflowError: HF205 when it cannot be imported.
        """
        function = node.function
        assert function is not None
        signature = parse_signature(function.signature)
        options = {name: node.options.get(name, default) for name, default in function.options.items()}
        trained = (port for port in signature.inputs if port.tag == "trained")
        return Loss(
            node=node.name,
            reference=function.reference,
            function=load_function(function.reference),
            inputs=signature.inputs,
            outputs=signature.outputs,
            computed=tuple(p.name for p in trained if not p.optional or options.get(f"{p.name}_coef")),
            options=options,
            group=group_sizes(node.type_of("tokens"), signature.inputs[0].type.dims[0]),
            aggregate=node.options["aggregate"],
            temperature=node.options["temperature"],
        )

    @property
    def unit(self) -> int:
        """Rows that belong together."""
        return prod(self.group)

    def reads(self, name: str) -> bool:
        return any(port.name == name for port in self.inputs)

    def per_group(self, name: str) -> bool:
        """Whether an input has one number per group of rows."""
        return any(port.name == name and self.level(port) == "group" for port in self.inputs)

    def level(self, port: Port) -> Level:
        rows = port.type.dims[0]
        if len(port.type.dims) > 1:
            return "token"
        return "row" if rows == self.inputs[0].type.dims[0] else "group"

    def __call__(self, inputs: Mapping[str, Tensor], rows: int, width: int) -> dict[str, Tensor]:
        """Call the function on `inputs`, each ``[rows]``, ``[rows, width]`` or, per group, ``[rows / unit]``.

        Returns:
            The outputs by name: ``[rows, width]``, ``[rows]`` or ``[rows / unit]``.

        A loss of another shape could still be broadcast against the weights of the tokens, but then the
        gradient would depend on how rows are cut into micro-batches.

        Raises:
            NodeError: the function raises, an output is missing or of another shape, or the loss cannot be
                differentiated.
        """
        arguments: dict[str, Any] = {port.name: None for port in self.inputs if port.tag == "trained"}
        for name, values in inputs.items():
            arguments[name] = values if self.per_group(name) else self._grouped(values)
        result = self._called(arguments)
        values = result if isinstance(result, tuple) else (result,)
        if len(values) != len(self.outputs):
            names = ", ".join(port.name for port in self.outputs)
            raise self._broken(f"returned {len(values)} values, declared are {names}")
        outputs: dict[str, Tensor] = {}
        for port, value in zip(self.outputs, values):
            self._check_shape(port, value, self._shape(port, rows, width))
            outputs[port.name] = value.flatten(0, len(self.group)) if self.level(port) != "group" else value
        if not outputs["loss"].requires_grad:
            raise self._broken("returned a `loss` without gradient: it is detached from what the model gives")
        return outputs

    def _called(self, arguments: Mapping[str, Any]) -> Tensor | tuple[Tensor, ...]:
        try:
            return self.function(**arguments, **self.options)
        except Exception as error:  # whatever a user's function raises is this node's failure
            raise self._broken(f"failed: {describe_failure(self.function, error)}") from error

    def _grouped(self, values: Tensor) -> Tensor:
        """``[rows, …]`` as ``[groups, k, …]`` for a function over groups."""
        return values.reshape(len(values) // self.unit, *self.group, *values.shape[1:])

    def _shape(self, port: Port, rows: int, width: int) -> list[int]:
        """What the function must return for `port`."""
        shapes: dict[Level, list[int]] = {
            "token": [rows // self.unit, *self.group, width],
            "row": [rows // self.unit, *self.group],
            "group": [rows // self.unit],
        }
        return shapes[self.level(port)]

    def _check_shape(self, port: Port, value: Any, shape: list[int]) -> None:
        if not isinstance(value, Tensor):
            raise self._broken(f"returned `{port.name}` as {type(value).__name__}, declared is {port.type}")
        if list(value.shape) != shape:
            came = f"`{port.name}` of shape {list(value.shape)}"
            raise self._broken(f"returned {came}, declared is {port.type}, here {shape}")

    def _broken(self, problem: str) -> NodeError:
        return NodeError(self.node, f"`{self.reference}` {problem}")
