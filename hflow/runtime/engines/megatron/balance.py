"""Rows of a minibatch spread over data-parallel ranks by tokens: else a rank would wait for another.

Losses are normalised over the whole minibatch, so who computes which rows changes nothing but time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce, all_to_all_single

from hflow.plan.row_balance import MOST_TOKENS
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.rows import Rows


def balanced(costs: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    """Owners under which no rank has much more than its share, with few moves from those that there are.

    One after the other, a row of the rank with the most goes to the rank with the least: the one that comes
    nearest to making both equal.

    Returns:
        The owner of each row. If a sum of costs still exceeds `MOST_TOKENS` times the mean, it exceeds the
        least sum by no more than the cheapest row there.
    """
    found, loads = list(owners), [0] * ranks
    for cost, owner in zip(costs, owners):
        loads[owner] += cost
    while max(loads) * ranks > MOST_TOKENS * sum(loads):
        most, least = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[most] - loads[least]
        movable = [row for row, owner in enumerate(found) if owner == most and 0 < costs[row] < gap]
        if not movable:
            break
        row = min(movable, key=lambda row: abs(2 * costs[row] - gap))
        found[row] = least
        loads[most] -= costs[row]
        loads[least] += costs[row]
    return found


class Exchange:
    """Which rows this rank trains on: `rows`, int64, their global numbers, ascending."""

    def __init__(
        self,
        tokens: Rows,
        mask: Rows,
        first_row: int,
        total: int,
        unit: int,
        minibatches: int,
        group: ProcessGroup,
        device: torch.device,
    ):
        """Agree on it with the other ranks; collective over the data-parallel `group`.

        Args:
            tokens, mask: this rank's rows, which begin at `first_row` of `total`.
            unit: rows that stay together; unit u belongs to minibatch u modulo `minibatches`.
            device: of tensors that `group` exchanges.
        """
        assert first_row % unit == len(tokens) % unit == 0, "a group is on several ranks"
        self._group, self._device, self._rank, self._unit = group, device, group.rank(), unit
        facts = torch.zeros(3, total, dtype=torch.int64)
        own = slice(first_row, first_row + len(tokens))
        facts[0, own], facts[1, own], facts[2, own] = tokens.row_lengths, mask.row_lengths, self._rank
        facts = facts.to(device)
        all_reduce(facts, group=group)
        self._tokens, self._responses, self._before = facts.cpu()
        costs = self._tokens.view(-1, unit).sum(1)
        owners = self._before[::unit].clone()
        for k in range(minibatches):
            part = slice(k, None, minibatches)
            owners[part] = torch.tensor(balanced(costs[part].tolist(), owners[part].tolist(), group.size()))
        self._after = owners.repeat_interleave(unit)
        self.rows = (self._after == self._rank).nonzero().squeeze(1)

    def __call__(self, rows: Rows, whole: bool = False, per_group: bool = False) -> Rows:
        """This rank's part of dense rows, or of those that have a value per response token; or, of `whole`
        ones, also per token of the prompt; or of dense values `per_group` of `unit` rows. Collective."""
        if torch.equal(self._before, self._after):
            return rows
        sizes = self._tokens if whole else self._responses
        if rows.lengths is None:
            sizes = torch.ones_like(sizes)
        return self._moved(rows, sizes, self._before, self._after, self._unit if per_group else 1)

    def back(self, rows: Rows) -> Rows:
        """From this rank's part, dense or with a value per response token, to the rows that it had before.
        Collective."""
        if torch.equal(self._before, self._after):
            return rows
        sizes = self._responses if rows.lengths is not None else torch.ones_like(self._responses)
        return self._moved(rows, sizes, self._after, self._before)

    def ragged(self, rows: Rows) -> Rows:
        """This rank's part of rows of any lengths. Collective."""
        if torch.equal(self._before, self._after):
            return rows
        sizes = torch.zeros_like(self._tokens)
        sizes[self._before == self._rank] = rows.row_lengths
        sizes = sizes.to(self._device)
        all_reduce(sizes, group=self._group)
        return self._moved(rows, sizes.cpu(), self._before, self._after)

    def _moved(self, rows: Rows, sizes: Tensor, before: Tensor, after: Tensor, unit: int = 1) -> Rows:
        """From those ranks which have each row `before` to those that have it `after`.

        Args:
            sizes: values of every row, on all ranks. unit: rows to which one of `rows` belongs.
        """
        before, after = before[::unit], after[::unit]
        given, wanted = ((ranks == self._rank).nonzero().squeeze(1) for ranks in (before, after))
        sent, come = after[given].argsort(stable=True), before[wanted].argsort(stable=True)
        gives, gets = self._splits(given, after, sizes), self._splits(wanted, before, sizes)
        received = self._swap(rows.take(sent).values, gives, gets)
        lengths = None if rows.lengths is None else sizes[wanted[come]]
        return Rows(received, lengths).take(come.argsort())

    def _splits(self, rows: Tensor, peers: Tensor, sizes: Tensor) -> list[int]:
        """How many values of the given rows each of their `peers` has."""
        splits = torch.zeros(self._group.size(), dtype=torch.int64)
        return splits.index_add_(0, peers[rows], sizes[rows]).tolist()

    def _swap(self, values: Tensor, gives: list[int], gets: list[int]) -> Tensor:
        """As bytes: not every backend exchanges every dtype."""
        width = values.element_size()
        received = torch.empty(width * sum(gets), dtype=torch.uint8, device=self._device)
        sent = values.contiguous().view(torch.uint8).to(self._device)
        all_to_all_single(
            received, sent, [width * n for n in gets], [width * n for n in gives], group=self._group
        )
        return received.cpu().view(values.dtype)


def exchanged(
    call: EngineCall,
    inputs: Mapping[str, Rows],
    unit: int,
    minibatches: int,
    groups: Groups,
    device: torch.device,
) -> Exchange:
    """Which of the rows of a call this rank trains on. Collective over the data-parallel ranks."""
    return Exchange(
        inputs["tokens"], inputs["mask"], call.first_row, call.node.rows, unit, minibatches, groups.dp, device
    )
