"""Training: minibatches of global rows, exact gradients for every layout and micro-batching.

The loss function returns one loss per response token, per row or per group of rows. Each is weighted by
counts over the whole minibatch, on all ranks (tokens as `hflow.ops.aggregate` says). Summed over
micro-batches and data-parallel ranks, the weighted losses therefore are the loss of the minibatch,
whoever computes which part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor
from torch.distributed import all_reduce

from hflow.graph.infer.kinds.generate import ROUTES
from hflow.graph.infer.kinds.train import balance_coef
from hflow.ops.aggregate import token_weights
from hflow.plan.routes import choices
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron.balance import exchanged
from hflow.runtime.engines.megatron.computed import Computed
from hflow.runtime.engines.megatron.divergence import NO_FAULT, agreed, diverged, norms_are_finite
from hflow.runtime.engines.megatron.dropout import numbered
from hflow.runtime.engines.megatron.learning_signal import leave_out_rounding
from hflow.runtime.engines.megatron.loss import Level, Loss
from hflow.runtime.engines.megatron.micro_batches import (
    MicroBatch,
    batches_of_update,
    budget_of,
    of_minibatch,
)
from hflow.runtime.engines.megatron.moe.balance import balanced
from hflow.runtime.engines.megatron.optimizer import Adam, AdamOptions
from hflow.runtime.engines.megatron.recompute import set_recompute
from hflow.runtime.engines.megatron.schedule import Finish, run_schedule
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.engines.megatron.shaped_config import shape_of_model
from hflow.runtime.engines.megatron.weights import MegatronWeights
from hflow.runtime.engines.protocol import EngineCall, MetricSums, NodeError
from hflow.runtime.rows import Rows

SAMPLED = "old_logprobs"  # of losses that weigh what was sampled
SKIPPED = "skipped_updates"
BALANCE = "expert_balance"


@dataclass(frozen=True)
class Minibatch:
    """What one update learns from: this rank's `rows` (int64), and counts over all ranks: of tokens to learn
    from, of rows with such tokens, and of groups. `first`: no update of this execution came before, so the
    model still is what sampled the rows, if no lag is between."""

    rows: Tensor
    global_tokens: float
    global_rows: float
    global_groups: float
    first: bool = False


@dataclass(frozen=True)
class Sums:
    """Of one micro-batch: its share of the minibatch's loss; of every output the sum, and of how many;
    whether the loss carries signal; and of what the model computed for it, whether it is `finite`."""

    loss: Tensor
    outputs: Mapping[str, tuple[Tensor, Tensor]]
    signal: Tensor
    finite: Mapping[str, Tensor]


@dataclass(frozen=True)
class Training:
    """One execution of a train node on this rank's rows.

    `rows`: their global numbers, int64, ascending. `inputs` holds what the loss reads: ``[rows]``,
    ``[groups]`` or ``[rows, longest response]``, right-padded, like `mask`. `sequences` has the places that
    `computed` asks for. `passed`: what the layers gave for each micro-batch of the first update, where a
    score node has made that forward pass.
    """

    call: EngineCall
    loss: Loss
    computed: Computed
    options: AdamOptions
    adam: Adam
    weights: MegatronWeights
    groups: Groups
    rows: Tensor
    sequences: Sequences
    inputs: Mapping[str, Tensor]
    mask: Tensor
    passed: Sequence[Tensor] | None = None

    @staticmethod
    def of(
        call: EngineCall,
        inputs: Mapping[str, Rows],
        adam: Adam,
        weights: MegatronWeights,
        groups: Groups,
        device: torch.device,
        passed: Sequence[Tensor] | None = None,
    ) -> Training:
        """Bring the rows to `device`, some from other data-parallel ranks. Collective over these.

        Raises:
            NodeError: an input of the loss is ragged in another way than the response, or no group of rows
                fits in a micro-batch.
        """
        loss, mask, limit = Loss.of(call.node), inputs["mask"], call.plan.micro_batch
        if limit < loss.unit:
            problem = f"a micro-batch of {limit} rows is too small for a group of {loss.unit}"
            raise NodeError(call.node.name, problem)
        for name in filter(loss.reads, inputs):
            lengths = inputs[name].lengths
            if lengths is not None and not torch.equal(lengths, mask.row_lengths):
                raise NodeError(call.node.name, f"`{name}` has not one value per response token")
        exchange = exchanged(call, inputs, loss.unit, call.node.minibatches, groups, device)
        kept = exchange.ragged(inputs["kept"]) if "kept" in inputs else None
        routes = exchange.ragged(inputs[ROUTES]) if ROUTES in inputs else None
        tokens, mask = exchange(inputs["tokens"], whole=True), exchange(mask)
        read: dict[str, Tensor] = {}
        for name in filter(loss.reads, inputs):
            rows = exchange(inputs[name], per_group=loss.per_group(name))
            read[name] = (rows.values if rows.lengths is None else rows.padded()).to(device)
        computed, options = (
            Computed.of(loss, adam.model, call.plan.strategy.share_forward),
            AdamOptions.of(call.node.options, call.steps * call.node.updates),
        )
        sequences = Sequences.of(tokens, mask, device, kept)
        sequences = computed.places(sequences.routed(routes, choices(shape_of_model(adam.model))))
        present = mask.padded().to(device)
        return Training(
            call, loss, computed, options, adam, weights, groups, exchange.rows, sequences, read, present,
            passed,
        )  # fmt: skip

    def run(self) -> MetricSums:
        """Make all updates. Collective over the mesh.

        Returns:
            (sum, weight) pairs; each is reported by one of the ranks that share a value. `mismatch`: how far
            the log-probs that came with the rows are from those before the first update, mean |difference|.
            `skipped_updates`: how many were not made, having nothing but rounding to learn from.
            `expert_balance`: the balancing loss, without its coefficient, before the update.

        Raises:
            NodeError: HF405, on all ranks, when a loss or a gradient is not finite, and that update is not
                made; or when it leaves a weight that is not. HF401, on the last pipeline stage, when the loss
                function breaks its signature.
        """
        repeat = self.call.node.repeat
        assert repeat is not None
        minibatches = self._minibatches(self.call.node.minibatches)
        updates = repeat.epochs * len(minibatches)
        metrics: MetricSums = {}
        self.adam.model.train()
        set_recompute(self.adam.model, self.call.plan.strategy.recompute == "full")
        for i in range(updates):
            minibatch = replace(minibatches[i % len(minibatches)], first=i == 0)
            found = self._update(minibatch, self.call.step * updates + i)
            for name, (total, weight) in found.items():
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before[0] + total, before[1] + weight)
        if SKIPPED in metrics:
            metrics[SKIPPED] = (metrics[SKIPPED][0], 1.0)  # their number, not a share
        return metrics

    def _minibatches(self, count: int) -> list[Minibatch]:
        numbers = self.rows.to(self.mask.device)
        parts = [of_minibatch(k, count, numbers, self.loss.unit) for k in range(count)]
        trained = self.mask.sum(1)
        local = [
            [float(trained[rows].sum()), float((trained[rows] > 0).sum()), len(rows) / self.loss.unit]
            for rows in parts
        ]
        counts = torch.tensor(local, dtype=torch.float64, device=self.mask.device)
        all_reduce(counts, group=self.groups.dp)
        return [Minibatch(rows, *found) for rows, found in zip(parts, counts.tolist())]

    def _update(self, minibatch: Minibatch, number: int) -> MetricSums:
        """Update `number` of this node in the whole run."""
        plan, passed = self.call.plan, self.passed if minibatch.first else None
        rows, budget = (self._drawn(number), minibatch.rows), budget_of(self.call.node, plan, self.adam.model)
        batches = batches_of_update(*rows, self.loss.unit, budget, plan.strategy, self.groups)
        self.adam.zero_grad()
        finish: Finish = lambda heads, part: self._loss(heads, part, minibatch)  # noqa: E731
        with self._balanced(batches) as metrics:
            sums = run_schedule(
                self.adam.model, self.groups, batches, finish, sp=plan.strategy.sp, passed=passed
            )
        grad_norm, (loss, signal) = self.adam.prepare(self.options.clip_grad), self._global_loss(sums)
        if not (isfinite(loss) and isfinite(grad_norm)):
            problem = f"update {number}: loss {loss}, gradient norm {grad_norm}"
            raise diverged(self.call, self.weights, self.groups.mesh, problem, _not_finite(sums))
        lr = self.options.rate.at(number)
        if signal:
            self.adam.update(lr, self.options.weight_decay)
            if not agreed(norms_are_finite(self.adam.model), self.groups.mesh):
                problem = f"after update {number}, of learning rate {lr:g}"
                raise diverged(self.call, self.weights, self.groups.mesh, problem)
        if not self.groups.reports:
            return {}
        metrics = _means(sums) | (metrics if self.groups.dp.rank() == 0 else {})
        if self.groups.dp.rank() == 0:
            metrics |= {"loss": (loss, 1.0), "grad_norm": (grad_norm, 1.0), "lr": (lr, 1.0)}
            metrics[SKIPPED] = (float(not signal), 1.0)
        return metrics

    def _drawn(self, number: int) -> Sequences:
        """The rows, whose tokens have numbers by which the model's adapter drops inputs, if it does."""
        adapter = shape_of_model(self.adam.model).adapter
        if adapter is None or not adapter.dropout:
            return self.sequences
        rows, seed = self.rows.to(self.mask.device), numbered(self.call.seed, self.call.node.name, number)
        return self.sequences.drawn(rows, seed)

    @contextmanager
    def _balanced(self, batches: tuple[MicroBatch, ...]) -> Iterator[MetricSums]:
        """With the gradient of the balancing loss, where the node has one; gives its metric."""
        coef = balance_coef(self.call.node)
        if not coef:
            yield {}
            return
        sp = self.call.plan.strategy.sp
        with balanced(self.adam.model, self.groups, batches, coef, sp) as loss:
            yield {BALANCE: (loss, 1.0)}

    def _loss(self, heads: Tensor, part: MicroBatch, minibatch: Minibatch) -> tuple[Tensor, Sums]:
        """A micro-batch's share of the minibatch's loss, to be differentiated, and what metrics need.

        Args:
            heads: of the last stage, hidden states ``[tokens, hidden]`` or values ``[tokens, 1]``.
        """
        rows, width = len(part.sequences), self.computed.width(part.sequences)
        trained = self.computed(heads, part)
        units = {name: self.loss.unit if self.loss.per_group(name) else 1 for name in self.inputs}
        given = {name: _rows_of(x, part, width, units[name]) for name, x in self.inputs.items()}
        outputs = self.loss(given | trained, rows, width)
        counted = self._counted(part, _rows_of(self.mask, part, width))
        sums: dict[str, tuple[Tensor, Tensor]] = {}
        for port in self.loss.outputs:
            counts = counted[self.loss.level(port)]
            sums[port.name] = _sum(outputs[port.name].detach().float(), counts), counts.sum()
        if minibatch.first and SAMPLED in given and "logprobs" in trained:
            apart = (trained["logprobs"].detach() - given[SAMPLED]).abs()
            sums["mismatch"] = _sum(apart, counted["token"]), counted["token"].sum()
        level = self.loss.level(self.loss.outputs[0])
        weights = self._weights(level, counted[level], minibatch)
        total = _sum(outputs["loss"], counted[level], weights)
        signal = leave_out_rounding(total, trained, self.adam.dtype)
        finite = {name: values.detach().isfinite().all() for name, values in trained.items()}
        return total, Sums(total.detach().clone(), sums, signal, finite)

    def _counted(self, part: MicroBatch, mask: Tensor) -> dict[Level, Tensor]:
        """Which tokens, rows and groups of a micro-batch count: no padding, and no rows without tokens."""
        present = torch.arange(len(mask), device=mask.device) < len(part.rows)
        return {"token": mask, "row": mask.any(1), "group": present[:: self.loss.unit]}

    def _weights(self, level: Level, counted: Tensor, minibatch: Minibatch) -> Tensor:
        """Under these weights the losses of all parts of the minibatch sum to its loss."""
        if level == "token":
            return token_weights(counted, self.loss.aggregate, minibatch.global_tokens, minibatch.global_rows)
        total = minibatch.global_groups if level == "group" else minibatch.global_rows
        return counted.float() / max(total, 1.0)

    def _global_loss(self, sums: list[Sums]) -> tuple[float, bool]:
        """The minibatch's loss, and whether any part of it carries signal, on every rank of the mesh: so all
        of them see when it is not finite, and make the update or do not."""
        found = torch.zeros(2, device=self.mask.device)
        if self.groups.reports:
            found[0] = torch.stack([part.loss for part in sums]).sum()
            found[1] = torch.stack([part.signal for part in sums]).sum()
        all_reduce(found, group=self.groups.mesh)
        loss, signals = found.tolist()
        return loss, signals > 0


def _rows_of(values: Tensor, part: MicroBatch, width: int, unit: int = 1) -> Tensor:
    """A micro-batch's rows of ``[rows]`` or ``[rows, longest]``, with its empty rows and width; of values per
    group of `unit` rows, its groups."""
    chosen = values[part.rows[::unit] // unit]
    empty = len(part.sequences) // unit - len(chosen)
    if empty:
        chosen = torch.cat([chosen, chosen.new_zeros(empty, *chosen.shape[1:])])
    return chosen[:, :width] if chosen.dim() > 1 else chosen


def _sum(values: Tensor, counted: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """Selected, not only multiplied: what a loss makes of padding may be infinite."""
    return (values.where(counted, 0.0) * weights).sum()


def _not_finite(sums: list[Sums]) -> str:
    """What the loss was given that is not finite."""
    bad = (name for part in sums for name, fine in part.finite.items() if not fine)
    found = next(bad, None)
    return f"the model's `{found}` are not finite, though its weights are" if found else NO_FAULT


def _means(sums: list[Sums]) -> MetricSums:
    """Sums of the loss's other outputs over this replica, with how many numbers they are sums of."""
    metrics: MetricSums = {}
    for name in (name for name in sums[0].outputs if name != "loss"):
        totals, counts = zip(*(part.outputs[name] for part in sums))
        metrics[name] = (float(torch.stack(totals).sum()), float(torch.stack(counts).sum()))
    return metrics
