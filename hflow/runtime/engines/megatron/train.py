"""Training: minibatches of global rows, exact gradients for every layout and micro-batching.

The loss function returns one loss per response token; `hflow.ops.aggregate` weights it by counts over
the whole minibatch, on all ranks. Summed over tokens, micro-batches and data-parallel ranks, the
weighted losses therefore are the loss of the minibatch, whoever computes which part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.distributed import all_reduce

from hflow.ops.aggregate import token_weights
from hflow.runtime.engines.base import Call, NodeError
from hflow.runtime.engines.megatron.groups import Groups
from hflow.runtime.engines.megatron.logprobs import log_probs
from hflow.runtime.engines.megatron.loss import Loss
from hflow.runtime.engines.megatron.optimizer import Adam
from hflow.runtime.engines.megatron.schedule import run_schedule
from hflow.runtime.engines.megatron.sequences import MicroBatch, Sequences, micro_batches
from hflow.runtime.rows import Rows

Metrics = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Minibatch:
    """What one update learns from: this rank's `rows` (int64), and counts over all ranks."""

    rows: Tensor
    global_tokens: float
    global_rows: float


@dataclass(frozen=True)
class Sums:
    """Of one micro-batch: its share of the minibatch's loss, its tokens, and its sum of every output."""

    loss: Tensor
    tokens: Tensor
    outputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class Training:
    """One execution of a train node on this rank's rows.

    `inputs` holds what the loss reads: ``[rows]``, or ``[rows, longest response]``, right-padded, like
    `mask`.
    """

    call: Call
    loss: Loss
    adam: Adam
    groups: Groups
    sequences: Sequences
    inputs: Mapping[str, Tensor]
    mask: Tensor

    @staticmethod
    def of(
        call: Call, inputs: Mapping[str, Rows], adam: Adam, groups: Groups, device: torch.device
    ) -> Training:
        """Bring the rows to `device`.

        Raises:
            NodeError: an input of the loss is ragged in another way than the response.
        """
        loss, mask = Loss.of(call.node), inputs["mask"]
        assert mask.lengths is not None
        read: dict[str, Tensor] = {}
        for name in inputs.keys() & set(loss.inputs):
            rows = inputs[name]
            if rows.lengths is not None and not torch.equal(rows.lengths, mask.lengths):
                raise NodeError(call.node.name, f"`{name}` has not one value per response token")
            read[name] = (rows.values if rows.lengths is None else rows.padded()).to(device)
        sequences = Sequences.of(inputs["tokens"], mask, device)
        return Training(call, loss, adam, groups, sequences, read, mask.padded().to(device))

    def run(self) -> Metrics:
        """Make all updates. Collective over the mesh.

        Returns:
            (sum, weight) pairs; each is reported by one of the ranks that share a value.

        Raises:
            NodeError: HF405, on all ranks, when a loss or a gradient is not finite; that update is not
                made. HF401, on the last pipeline stage, when the loss function breaks its signature.
        """
        repeat = self.call.node.repeat
        assert repeat is not None
        minibatches = self._minibatches(self.call.node.rows // (repeat.minibatch or self.call.node.rows))
        updates = repeat.epochs * len(minibatches)
        metrics: Metrics = {}
        self.adam.model.train()
        for i in range(updates):
            found = self._update(minibatches[i % len(minibatches)], self.call.step * updates + i)
            for name, (total, weight) in found.items():
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before[0] + total, before[1] + weight)
        return metrics

    def _minibatches(self, count: int) -> list[Minibatch]:
        """Minibatch k has the rows whose global number is k modulo `count`, whatever the layout."""
        numbers = torch.arange(len(self.sequences), device=self.mask.device) + self.call.first_row
        parts = [(numbers % count == k).nonzero().squeeze(1) for k in range(count)]
        trained = self.mask.sum(1)
        local = [[float(trained[rows].sum()), float(len(rows))] for rows in parts]
        counts = torch.tensor(local, dtype=torch.float64, device=self.mask.device)
        all_reduce(counts, group=self.groups.dp)
        return [Minibatch(rows, tokens, n) for rows, (tokens, n) in zip(parts, counts.tolist())]

    def _update(self, minibatch: Minibatch, number: int) -> Metrics:
        """Update `number` of the whole run."""
        same_shape = self.groups.pp.size() > 1
        batches = micro_batches(self.sequences, minibatch.rows, self.call.plan.micro_batch, same_shape)
        self.adam.zero_grad()
        sums = run_schedule(
            self.adam.model, self.groups, batches, lambda logits, part: self._loss(logits, part, minibatch)
        )
        grad_norm, loss = self.adam.prepare(), self._global_loss(sums)
        if not (isfinite(loss) and isfinite(grad_norm)):
            problem = f"update {number}: loss {loss}, gradient norm {grad_norm}"
            raise NodeError(self.call.node.name, problem, "HF405")
        lr = self.adam.options.lr_at(number)
        self.adam.update(lr)
        if not self.groups.reports:
            return {}
        metrics = _token_means(sums)
        if self.groups.dp.rank() == 0:
            metrics |= {"loss": (loss, 1.0), "grad_norm": (grad_norm, 1.0), "lr": (lr, 1.0)}
        return metrics

    def _loss(self, logits: Tensor, part: MicroBatch, minibatch: Minibatch) -> tuple[Tensor, Sums]:
        """A micro-batch's share of the minibatch's loss, to be differentiated, and what metrics need."""
        response = part.sequences.response_mask
        flat = log_probs(
            logits,
            part.sequences.targets,
            self.groups.tp,
            self.loss.temperature,
            "entropy" in self.loss.inputs,
        )
        trained = {
            name: values.new_zeros(response.shape).masked_scatter(response, values)
            for name, values in zip(("logprobs", "entropy"), flat)
            if name in self.loss.inputs
        }
        width = response.shape[1]
        given = {name: _rows_of(values, part, width) for name, values in self.inputs.items()}
        mask = _rows_of(self.mask, part, width)
        outputs = self.loss(given | trained, mask.shape)
        weights = token_weights(mask, self.loss.aggregate, minibatch.global_tokens, minibatch.global_rows)
        # Selected, not only multiplied: what a loss makes of padding may be infinite.
        total = (outputs["loss"].where(mask, 0.0) * weights).sum()
        sums = {name: values.detach().float().where(mask, 0.0).sum() for name, values in outputs.items()}
        return total, Sums(total.detach().clone(), mask.sum(), sums)

    def _global_loss(self, sums: list[Sums]) -> float:
        """The minibatch's loss on every rank of the mesh, so that all of them see when it is not finite."""
        loss = torch.zeros((), device=self.mask.device)
        if self.groups.reports:
            loss = torch.stack([part.loss for part in sums]).sum()
        all_reduce(loss, group=self.groups.mesh)
        return float(loss)


def _rows_of(values: Tensor, part: MicroBatch, width: int) -> Tensor:
    """A micro-batch's rows of ``[rows]`` or ``[rows, longest]``, with its empty rows and width."""
    chosen = values[part.rows]
    empty = len(part.sequences) - len(part.rows)
    if empty:
        chosen = torch.cat([chosen, chosen.new_zeros(empty, *chosen.shape[1:])])
    return chosen[:, :width] if chosen.dim() > 1 else chosen


def _token_means(sums: list[Sums]) -> Metrics:
    """Sums of the loss's other outputs over this replica's tokens, with the number of tokens."""
    tokens = float(sum(int(part.tokens) for part in sums))
    names = [name for name in sums[0].outputs if name != "loss"]
    return {name: (float(torch.stack([part.outputs[name] for part in sums]).sum()), tokens) for name in names}
