"""The loss function of a train node, ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hflow.graph.graph import Node
from hflow.graph.signature import Port, parse_signature
from hflow.runtime.engines.base import NodeError
from hflow.runtime.functions import load_function


@dataclass(frozen=True)
class Loss:
    """`function` maps tensors named `inputs` to one tensor per output, each ``[rows, longest response]``.

    `aggregate` and `temperature` say how its losses are summed, and at which temperature the model's
    log-probs are taken.
    """

    node: str
    reference: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[Port, ...]
    options: Mapping[str, Any]
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
        return Loss(
            node=node.name,
            reference=function.reference,
            function=load_function(function.reference),
            inputs=tuple(port.name for port in signature.inputs),
            outputs=signature.outputs,
            options={name: node.options.get(name, default) for name, default in function.options.items()},
            aggregate=node.options["aggregate"],
            temperature=node.options["temperature"],
        )

    def __call__(self, inputs: Mapping[str, Tensor], shape: torch.Size) -> dict[str, Tensor]:
        """The function's outputs by name, each of `shape`, ``[rows, longest response]``.

        A loss of another shape could still be broadcast against the weights of the tokens, but then the
        gradient would depend on how rows are cut into micro-batches.

        Raises:
            NodeError: an output is missing or of another shape, or the loss cannot be differentiated.
        """
        result = self.function(**inputs, **self.options)
        values = result if isinstance(result, tuple) else (result,)
        if len(values) != len(self.outputs):
            names = ", ".join(port.name for port in self.outputs)
            raise self._broken(f"returned {len(values)} values, declared are {names}")
        for port, value in zip(self.outputs, values):
            self._check_shape(port, value, shape)
        outputs = {port.name: value for port, value in zip(self.outputs, values)}
        if not outputs["loss"].requires_grad:
            raise self._broken("returned a `loss` without gradient: it is detached from the log-probs")
        return outputs

    def _check_shape(self, port: Port, value: Any, shape: torch.Size) -> None:
        if not isinstance(value, Tensor):
            raise self._broken(f"returned `{port.name}` as {type(value).__name__}, declared is {port.type}")
        if value.shape != shape:
            came = f"`{port.name}` of shape {list(value.shape)}"
            raise self._broken(f"returned {came}, declared is {port.type}, here {list(shape)}")

    def _broken(self, problem: str) -> NodeError:
        return NodeError(self.node, f"`{self.reference}` {problem}")
