"""Into how many micro-batches a replica cuts the rows that it trains on or scores, and their tokens.

Rows of one prompt that are in one micro-batch have its tokens once, and the last token of a response is not
read.

Where lengths are stated, the engine's rule is applied to rows of such lengths (`hflow.plan.packing`).
Pipeline stages exchange tensors of one shape, so that all micro-batches are padded to the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from math import ceil, gcd, sqrt
from random import Random
from statistics import NormalDist

from hflow.graph.ir import Head
from hflow.graph.lengths import Lengths
from hflow.plan.packing import PackedRows, TokenBudget, filled, fullness, packed
from hflow.plan.row_balance import MOST_TOKENS
from hflow.plan.workload import Workload

MOST_ROWS = 512  # that are packed one by one; more are like these


@dataclass(frozen=True)
class MicroBatches:
    """Of the replica with the most tokens. `rows` of each micro-batch, their different `prompts`, and the
    `tokens` that pass through the layers."""

    count: float
    tokens: float
    rows: float
    prompts: float


@lru_cache(maxsize=65536)
def passes(
    work: Workload,
    replicas: int,
    micro_batch: int,
    head: Head,
    padded: bool,
    trains: bool,
    whole_rows: bool = False,
) -> MicroBatches:
    """Of all rows of a score node, or those of one update of a train node.

    Args:
        replicas: over which the rows are spread.
        padded: to the largest micro-batch, as for pipeline stages.
        whole_rows: each row passes whole, with its prompt and its last token.
    """
    rows = (work.rows_per_update if trains else work.rows) / replicas
    alike = max(1.0, min(rows, work.alike_in_update if trains else work.alike))
    of_replica = work, rows, micro_batch, head, alike
    count, of_each, prompts = _counted(*of_replica)
    prompts = 1.0 if whole_rows else prompts
    of_row = prompts * work.mean_prompt + work.mean_response - (0 if whole_rows else 1)
    if work.varies and replicas > 1:
        spread = sqrt(_variance(work, prompts**2 * alike) / rows) / of_row
        count *= _fullest(replicas, spread, trains)
        of_each = rows / count
    tokens = of_each * of_row * (_padding(*of_replica) if padded else 1.0)
    return MicroBatches(count, tokens, of_each, of_each * prompts)


@lru_cache(maxsize=4096)
def _counted(
    work: Workload, rows: float, micro_batch: int, head: Head, alike: float
) -> tuple[float, float, float]:
    """The number of micro-batches, their rows, and how many prompts there are for each row.

    Args:
        alike: rows of each prompt.
    """
    if not work.varies:
        return ceil(rows / micro_batch), micro_batch, _prompts(micro_batch, alike) / micro_batch
    budget, drawn = TokenBudget.of(work, micro_batch, head), _drawn(work, rows, round(alike))
    parts = _cut(drawn, filled([group.rows for group in drawn], budget))
    there = sum(len(group.rows.lengths) for group in drawn)
    prompts = sum(len(_prompts_of(part)) for part in parts)
    filling = len(parts) - 1 + min(1.0, fullness([group.rows for group in parts[-1]], budget))
    number = ceil(max(1.0, rows / there) * filling)
    return number, rows / number, prompts / there


@lru_cache(maxsize=4096)
def _padding(work: Workload, rows: float, micro_batch: int, head: Head, alike: float) -> float:
    """How many times as many tokens as the mean the largest micro-batch has."""
    if not work.varies:
        return 1.0
    budget, drawn = TokenBudget.of(work, micro_batch, head), _drawn(work, rows, round(alike))
    parts = _cut(drawn, packed([group.rows for group in drawn], budget))
    tokens = [sum(_prompts_of(part).values()) + sum(group.rows.predicted for group in part) for part in parts]
    return max(tokens) * len(tokens) / sum(tokens)


def _cut(drawn: Sequence[_Drawn], sizes: Iterable[int]) -> list[list[_Drawn]]:
    groups = iter(drawn)
    return [list(islice(groups, size)) for size in sizes]


def _prompts_of(groups: Iterable[_Drawn]) -> dict[int, float]:
    """The tokens of each."""
    return {group.number: group.prompt for group in groups}


@dataclass(frozen=True)
class _Drawn:
    """Rows that stay together, of a prompt with this `number` and of so many tokens."""

    number: int
    prompt: float
    rows: PackedRows


@lru_cache(maxsize=256)
def _drawn(work: Workload, rows: float, alike: int) -> tuple[_Drawn, ...]:
    """Groups of rows in the order in which they are packed, prompt by prompt, the longest first: evenly
    spaced quantiles of the lengths, in an order at random (always the same)."""
    unit = work.group
    alike = max(alike // unit, 1) * unit
    count = max(1, min(MOST_ROWS, ceil(rows)) // alike)
    random = Random(0)
    prompts = _spaced(work.prompts, work.prompt, count, random)
    responses = iter(_spaced(work.responses, work.response, count * alike, random))
    found = list[list[_Drawn]]()
    for number, prompt in enumerate(prompts):
        of_prompt = list[_Drawn]()
        for _ in range(alike // unit):
            own = list(islice(responses, unit))
            of_prompt.append(_Drawn(number, prompt, PackedRows(tuple(prompt + n - 1 for n in own), sum(own))))
        found.append(sorted(of_prompt, key=_longest, reverse=True))
    found.sort(key=lambda of_prompt: _longest(of_prompt[0]), reverse=True)
    return tuple(group for of_prompt in found for group in of_prompt)


def _longest(group: _Drawn) -> float:
    return max(group.rows.lengths)


def _spaced(lengths: Lengths | None, greatest: int, count: int, random: Random) -> list[float]:
    """Evenly spaced quantiles, shuffled; the greatest length where none are stated."""
    if lengths is None:
        return [greatest] * count
    found = [lengths.quantile((row + 0.5) / count) for row in range(count)]
    random.shuffle(found)
    return found


def _prompts(rows: float, alike: float) -> float:
    """Of a micro-batch of `rows` rows, where each prompt's `alike` rows follow each other: on average, those
    that begin in it and what is left of one that began before. Both begin on one grid, of whole rows."""
    of_prompt, step = Fraction(alike).limit_denominator(4096), 1.0
    if rows == round(rows):
        step = max(1.0, gcd(round(rows) * of_prompt.denominator, of_prompt.numerator) / of_prompt.denominator)
    return 1 + (rows - min(step, rows)) / alike


def _variance(work: Workload, alike: float) -> float:
    """Of a row's tokens, where those of a prompt are as many in `alike` rows."""
    of_prompts = work.prompts.variance * alike if work.prompts else 0.0
    return of_prompts + (work.responses.variance if work.responses else 0.0)


def _fullest(replicas: int, spread: float, trains: bool) -> float:
    """How many times as many tokens as the mean replica the one has for which the others wait: the greatest
    of so many sums, each about normal (Blom, Statistical Estimates, 1958), whose standard deviation is
    `spread` of the mean. Rows that are trained on are moved where it is more than `MOST_TOKENS`."""
    deviations = NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25))
    found = 1 + deviations * spread
    return min(found, MOST_TOKENS) if trains else found
