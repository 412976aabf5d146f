"""Rows packed into micro-batches: as many as have no more tokens than the plan's rows of the greatest length.

Rows lie in a micro-batch without padding, so what it needs is told by its tokens, and by those of responses,
which have logits. Attention on GPUs takes rows of about the same length as one padded block, so that tokens
count as they lie in blocks. Engines pack by this rule, and plans count by it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from hflow.graph.ir import Head
from hflow.plan.workload import Workload

LEAST_FILL = 0.75  # of the longest row that attention sees beside it
HALVINGS = 6  # of the range of budgets in which the least for as many micro-batches is sought


@dataclass(frozen=True)
class PackedRows:
    """Rows that stay together: of each the `lengths` of what passes through the layers, and how many tokens
    they `predict` together."""

    lengths: tuple[float, ...]
    predicted: float


@dataclass(frozen=True)
class TokenBudget:
    """The most `tokens` of a micro-batch, as they lie in blocks, and how many it may predict."""

    tokens: float
    predicted: float

    @staticmethod
    def of(work: Workload, micro_batch: int, head: Head) -> TokenBudget:
        """That of `micro_batch` rows of the greatest lengths. A scalar head makes no logits."""
        predicted = inf if head == "scalar" else micro_batch * work.response
        return TokenBudget(micro_batch * work.sequence, predicted)


def packed(groups: Sequence[PackedRows], budget: TokenBudget) -> list[int]:
    """How many of the groups, which follow each other, each micro-batch has: as few micro-batches as the
    budget admits, about equally full. A group that exceeds it has its own."""
    sizes = filled(groups, budget)
    least, most = 1 / max(1, len(sizes)), 1.0
    for _ in range(HALVINGS if len(sizes) > 1 else 0):
        share = (least + most) / 2
        found = filled(groups, TokenBudget(share * budget.tokens, share * budget.predicted))
        if len(found) > len(sizes):
            least = share
        else:
            most, sizes = share, found
    return sizes


def filled(groups: Iterable[PackedRows], budget: TokenBudget) -> list[int]:
    """The same, each filled before the next one begins."""
    sizes = list[int]()
    lengths, tokens, predicted = list[float](), 0.0, 0.0
    for group in groups:
        for length in group.lengths:
            insort(lengths, length)
        tokens, predicted = tokens + sum(group.lengths), predicted + group.predicted
        if not sizes or predicted > budget.predicted or not _fit(lengths, tokens, budget.tokens):
            sizes.append(0)
            lengths, tokens, predicted = sorted(group.lengths), sum(group.lengths), group.predicted
        sizes[-1] += 1
    return sizes


def blocks(lengths: Iterable[float]) -> list[tuple[int, float]]:
    """(rows, longest) of the fewest blocks that are full enough, of `lengths` from the longest on."""
    found = list[tuple[int, float]]()
    for length in lengths:
        if found and length >= LEAST_FILL * found[-1][1]:
            found[-1] = found[-1][0] + 1, found[-1][1]
        else:
            found.append((1, length))
    return found


def fullness(groups: Iterable[PackedRows], budget: TokenBudget) -> float:
    """The share of `budget` that they need; above 1 where a group exceeds it."""
    found = [*groups]
    lengths = sorted((length for group in found for length in group.lengths), reverse=True)
    predicted = sum(group.predicted for group in found)
    return max(_in_blocks(lengths) / budget.tokens, predicted / budget.predicted)


def _fit(lengths: Sequence[float], tokens: float, most: float) -> bool:
    """Whether rows of such `lengths`, rising, have at most so many tokens in blocks.

    Args:
        tokens: their sum.
    """
    if tokens > most:
        return False
    return tokens <= LEAST_FILL * most or _in_blocks(reversed(lengths)) <= most


def _in_blocks(lengths: Iterable[float]) -> float:
    """The tokens of rows of such `lengths`, falling, with the padding of blocks."""
    return sum(rows * longest for rows, longest in blocks(lengths))
