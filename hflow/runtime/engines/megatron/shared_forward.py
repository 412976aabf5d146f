"""One forward pass for a score node and the first update of its model (`hflow.plan.shared_forward`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hflow.graph.ir import Node
from hflow.plan.node_plan import NodePlan
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron.balance import Exchange, exchanged
from hflow.runtime.engines.megatron.loss import Loss
from hflow.runtime.engines.megatron.micro_batches import (
    MicroBatch,
    batches_of_update,
    budget_of,
    of_minibatch,
)
from hflow.runtime.engines.megatron.recompute import set_recompute
from hflow.runtime.engines.megatron.schedule import Finish, run_schedule
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.rows import Rows


@dataclass(frozen=True)
class Trainer:
    """The train node of a model, its plan, and the model as its optimizer knows it."""

    node: Node
    plan: NodePlan
    model: torch.nn.Module


@dataclass(frozen=True)
class SharedForward:
    """Of one execution of the score node. The rows lie as the training has them (`exchange`), which first
    learns from `first`, int64: numbers among this rank's. `passed`: what its layers gave for each micro-batch
    of these, with what the backward pass needs, once `run`."""

    trainer: Trainer
    groups: Groups
    exchange: Exchange
    unit: int
    first: Tensor
    passed: list[Tensor] = field(default_factory=list[Tensor])

    @staticmethod
    def of(
        trainer: Trainer, call: EngineCall, inputs: Mapping[str, Rows], groups: Groups, device: torch.device
    ) -> SharedForward:
        """Before the `call` of the score node. Collective over the data-parallel ranks."""
        unit, count = Loss.of(trainer.node).unit, trainer.node.minibatches
        exchange = exchanged(call, inputs, unit, count, groups, device)
        first = of_minibatch(0, count, exchange.rows.to(device), unit)
        return SharedForward(trainer, groups, exchange, unit, first)

    def taken(self, inputs: Mapping[str, Rows]) -> dict[str, Rows]:
        """This rank's part of what the score node reads. Collective."""
        moved = {"tokens": self.exchange(inputs["tokens"], whole=True), "mask": self.exchange(inputs["mask"])}
        if "kept" in inputs:
            moved["kept"] = self.exchange.ragged(inputs["kept"])
        return moved

    def others(self, rows: Tensor) -> Tensor:
        """Those of `rows` that the first update does not learn from."""
        return rows[~torch.isin(rows, self.first)]

    def run(self, sequences: Sequences, finish: Finish) -> tuple[tuple[MicroBatch, ...], list[Any]]:
        """Pass the micro-batches of the first update forward as training does.

        Returns:
            The micro-batches, and what `finish` wants kept of each.
        """
        plan, model = self.trainer.plan, self.trainer.model
        budget = budget_of(self.trainer.node, plan, model)
        batches = batches_of_update(sequences, self.first, self.unit, budget, plan.strategy, self.groups)

        def keep(heads: Tensor, batch: MicroBatch) -> tuple[Tensor, Any]:
            self.passed.append(heads)
            with torch.no_grad():
                return finish(heads.detach(), batch)

        model.train()
        set_recompute(model, plan.strategy.recompute == "full")
        with torch.enable_grad():
            found = run_schedule(model, self.groups, batches, keep, forward_only=True, sp=plan.strategy.sp)
        return batches, found
