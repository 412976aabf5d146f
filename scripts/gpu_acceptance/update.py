"""One update of a model by hflow's engine, as a train node makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hflow.graph.ir import Function, Input, Node, Ref, Repeat
from hflow.graph.types import Dim, DType, Factor, ValueType
from hflow.ops.losses import negative_log_likelihood
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.strategy import Strategy
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.rows import Rows, from_lists

ADAM: Mapping[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-3,  # large, so that the update is smooth where gradients are near 0
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "warmup_steps": 0,
}
MICRO_BATCH = 5


def train(
    model: MegatronModel, tokens: list[list[int]], lengths: list[int], strategy: Strategy, micro_batch: int
) -> None:
    """One update over all rows, whose last `lengths` tokens are responses."""
    rows = len(tokens)
    plan = NodePlan(
        "actor_train", "train", "actor", "megatron", Mesh.of((0,)), micro_batch, 0.0, 0.0, 0, strategy
    )
    mask = Rows(torch.ones(sum(lengths), dtype=torch.bool), torch.tensor(lengths))
    node = _node(rows, max(map(len, tokens)), max(lengths))
    call = EngineCall(node, plan, 0, rows, seed=0, step=0)
    model.run(call, {"tokens": from_lists(tokens), "mask": mask})


def update(
    model: MegatronModel, tokens: list[list[int]], lengths: list[int], strategy: Strategy
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient and weights after one update over all rows, by name. The engine's weights are lost."""
    train(model, tokens, lengths, strategy, MICRO_BATCH)
    after = _read(model)
    for parameter in model.model.parameters():  # read by the weights' own names
        parameter.data.copy_(parameter.main_grad)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return _read(model), after


def _read(model: MegatronModel) -> dict[str, Tensor]:
    weights = model.weights
    return {name: weights.read(name, weights.box(name)).float().cpu().clone() for name in weights.names()}


def _node(rows: int, longest: int, response: int) -> Node:
    """Of rows of so many tokens at most, of which those of the response are so many."""
    inputs = (_rows("tokens", "i32", rows, longest), _rows("mask", "bool", rows, response))
    loss: Any = negative_log_likelihood
    function = Function(
        "hflow.ops.losses.negative_log_likelihood", loss.__hflow_signature__, {}, ("logprobs",)
    )
    return Node(
        "actor_train",
        "train",
        function=function,
        inputs=inputs,
        options=dict(ADAM) | {"aggregate": "token_mean", "temperature": 1.0},
        repeat=Repeat(1, rows),
    )


def _rows(port: str, dtype: DType, rows: int, longest: int) -> Input:
    dims = Dim((Factor("rows", rows),)), Dim((Factor("seq", longest),), True)
    return Input(port, Ref("examples", port), ValueType(dtype, dims))
