"""Rows cut into micro-batches of about as many tokens, each without padding."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from hflow.graph.ir import Node
from hflow.plan.node_plan import NodePlan
from hflow.plan.packing import PackedRows, TokenBudget, packed
from hflow.plan.strategy import Strategy
from hflow.plan.workload import workload
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron.context_shard import ContextShard
from hflow.runtime.engines.megatron.pack import Pack
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.engines.megatron.shaped_config import shape_of_model


@dataclass(frozen=True)
class MicroBatch:
    """`rows`: int64, which rows of the whole these are; `sequences` has empty ones in place of none. `pack`:
    what of them this rank runs."""

    rows: Tensor
    sequences: Sequences
    pack: Pack | ContextShard


def micro_batches(
    sequences: Sequences,
    rows: Tensor,
    budget: TokenBudget,
    same_shape: bool,
    unit: int = 1,
    cp: ProcessGroup | None = None,
    multiple: int = 1,
    in_step: ProcessGroup | None = None,
    in_sets_of: int = 1,
) -> tuple[MicroBatch, ...]:
    """Cut `rows` of `sequences` into micro-batches; at least one, on which there may be none.

    A micro-batch holds whole groups of `unit` rows, as many as `budget` admits, at least one. Rows of one
    prompt and rows of about the same length are together. Pipeline stages exchange tensors of one shape, so
    with `same_shape` all have equally many tokens, by padding. Ranks that share experts pass equally many:
    all of the group `in_step`, over which this is then collective, get as many as the one with the most, the
    others some without rows. So do all to make whole sets, `in_sets_of` so many, as interleaved stages pass
    them on.

    Args:
        cp: the context-parallel group, all ranks of which have the same rows and run a part of each.
        multiple: of which the number of places is, by padding.
    """
    assert len(rows) % unit == 0, (len(rows), unit)
    whole = sequences.take(rows)
    parts = _parts(whole, budget, unit)
    if in_step and in_step.size() > 1:
        parts += [rows[:0]] * (_most(len(parts), in_step, rows.device) - len(parts))
    parts += [rows[:0]] * (-len(parts) % in_sets_of)
    taken = [whole.take(part) if len(part) else _nothing(whole, unit) for part in parts]
    packs = [_run_here(part, cp) for part in taken]
    most = max(len(pack.tokens) for pack in packs)
    sizes = [most if same_shape else len(pack.tokens) for pack in packs]
    packs = [pack.padded(ceil(size / multiple) * multiple) for pack, size in zip(packs, sizes)]
    return tuple(MicroBatch(rows[part], of, pack) for part, of, pack in zip(parts, taken, packs))


def budget_of(node: Node, plan: NodePlan, model: torch.nn.Module) -> TokenBudget:
    """That of a micro-batch of a score or train node."""
    return TokenBudget.of(workload(node), plan.micro_batch, shape_of_model(model).head)


def batches_of_update(
    sequences: Sequences, rows: Tensor, unit: int, budget: TokenBudget, strategy: Strategy, groups: Groups
) -> tuple[MicroBatch, ...]:
    """The micro-batches of one update of a train node: `rows` of this rank, in groups of `unit`."""
    return micro_batches(
        sequences, rows, budget, groups.pp.size() > 1, unit, in_step=groups.ep, cp=groups.cp,
        multiple=groups.tp.size() if strategy.sp else 1,
        in_sets_of=groups.pp.size() if strategy.vpp > 1 else 1,
    )  # fmt: skip


def of_minibatch(number: int, count: int, rows: Tensor, unit: int) -> Tensor:
    """Which of a rank's rows are in minibatch `number` of `count`, int64: the groups whose global number is
    that modulo `count`, whatever the layout. `rows`: the global numbers of all of its rows."""
    return (rows // unit % count == number).nonzero().squeeze(1)


def _run_here(sequences: Sequences, cp: ProcessGroup | None) -> Pack | ContextShard:
    return ContextShard.of(sequences, cp) if cp and cp.size() > 1 else Pack.of(sequences)


def _parts(sequences: Sequences, budget: TokenBudget, unit: int) -> list[Tensor]:
    """The rows of each micro-batch, int64; one empty part for no rows."""
    if not len(sequences):
        return [sequences.prompt_lengths]
    responses = sequences.response_lengths.view(-1, unit)
    inputs = sequences.prompt_lengths.view(-1, unit) + (responses - 1).clamp(min=0)
    lengths, predicted = inputs.tolist(), responses.sum(1).tolist()
    order = _order(sequences.same_prompt[::unit].tolist(), [max(of_group) for of_group in lengths])
    sizes = packed([PackedRows(tuple(lengths[group]), predicted[group]) for group in order], budget)
    groups = torch.arange(len(sequences), device=sequences.tokens.device).view(-1, unit)
    return [rows.flatten() for rows in groups[order].split(sizes)]


def _most(number: int, group: ProcessGroup, device: torch.device) -> int:
    """The greatest number of any rank."""
    found = torch.tensor(number, device=device)
    all_reduce(found, op=ReduceOp.MAX, group=group)
    return int(found)


def _order(prompts: list[int], lengths: list[int]) -> list[int]:
    """Longest first, and with each group of rows those of the same prompt."""
    longest = dict.fromkeys(prompts, 0)
    for prompt, length in zip(prompts, lengths):
        longest[prompt] = max(longest[prompt], length)
    key = lambda group: (-longest[prompts[group]], prompts[group], -lengths[group])  # noqa: E731
    return sorted(range(len(prompts)), key=key)


def _nothing(sequences: Sequences, unit: int) -> Sequences:
    """A group of rows without tokens."""
    none = sequences.prompt_lengths.new_zeros(unit)
    return Sequences(sequences.tokens.new_zeros(unit, 0), none, none)
