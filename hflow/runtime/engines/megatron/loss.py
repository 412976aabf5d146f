"""The loss function of a train node, ready to be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hflow.graph.graph import Node
from hflow.runtime.functions import load_function, output_names


@dataclass(frozen=True)
class Loss:
    """`function` maps tensors named `inputs` to one tensor per output, each ``[rows, longest response]``.

    `aggregate` and `temperature` say how its losses are summed, and at which temperature the model's
    log-probs are taken.
    """

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: Mapping[str, Any]
    aggregate: str
    temperature: float

    @staticmethod
    def of(node: Node) -> Loss:
        """Import the function that `node` names.

        Raises:
            HflowError: HF205 when it cannot be imported.
        """
        assert node.function is not None
        function = load_function(node.function.reference)
        return Loss(
            function=function,
            inputs=tuple(inspect.signature(function).parameters),
            outputs=output_names(node.function.signature),
            options={
                name: node.options.get(name, default) for name, default in node.function.options.items()
            },
            aggregate=node.options["aggregate"],
            temperature=node.options["temperature"],
        )

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The function's outputs by name."""
        result = self.function(**inputs, **self.options)
        values = result if isinstance(result, tuple) else (result,)
        return dict(zip(self.outputs, values, strict=True))
