"""Into how many micro-batches a replica cuts the rows that it trains on or scores, and their tokens.

Where lengths are stated, that is what the engine does with rows of different lengths: a micro-batch holds as
many as need no more memory than `micro_batch` rows of the longest would, rows of one prompt together, longest
first, without padding; pipeline stages exchange tensors of one shape, so that all are padded to the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from random import Random
from statistics import NormalDist

from hflow.graph.lengths import Lengths
from hflow.plan.row_balance import MOST_TOKENS
from hflow.plan.workload import Workload

MOST_ROWS = 2048  # that are packed one by one; more are like these


@dataclass(frozen=True)
class MicroBatches:
    """Of the replica with the most tokens. `tokens`: of each micro-batch, those of `rows` rows."""

    count: float
    tokens: float
    rows: float


@lru_cache(maxsize=65536)
def passes(work: Workload, replicas: int, micro_batch: int, padded: bool, trains: bool) -> MicroBatches:
    """Of all rows of a score node, or those of one update of a train node.

    Args:
        replicas: over which the rows are spread.
        padded: to the largest micro-batch, as for pipeline stages.
    """
    rows = (work.rows_per_update if trains else work.rows) / replicas
    if not work.varies:
        return MicroBatches(ceil(rows / micro_batch), micro_batch * work.mean_sequence, micro_batch)
    longest = work.mean_prompt + (work.responses.longest_of(rows) if work.responses else work.response)
    if work.prompts and not work.responses:
        longest = work.prompts.longest_of(rows / work.alike) + work.response
    count, padding = _packed(work, rows, micro_batch, longest)
    count *= _fullest(work, rows, replicas, trains)
    tokens = rows * work.mean_sequence / count
    return MicroBatches(count, tokens * padding if padded else tokens, rows / count)


@lru_cache(maxsize=4096)
def _packed(work: Workload, rows: float, limit: int, longest: float) -> tuple[float, float]:
    """The number of micro-batches, and how many times as many tokens as the mean the largest has.

    Args:
        longest: row that the replica has.
    """
    if work.group > 1 or not work.responses:  # whole groups, or rows whose responses are all the greatest
        return ceil(rows / limit), longest / work.mean_sequence if work.prompts else 1.0
    ordered = _ordered(work.responses, rows, work.alike)
    most, sizes = limit * longest, list[float]()
    count, top, tokens = 0, 0.0, 0.0
    for response in ordered:
        length = work.mean_prompt + response
        if count and (count + 1) * max(top, length) > most:
            sizes.append(tokens)
            count, top, tokens = 0, 0.0, 0.0
        count, top, tokens = count + 1, max(top, length), tokens + length
    sizes.append(tokens)
    return len(sizes) * max(1.0, rows / len(ordered)), max(sizes) * len(sizes) / sum(sizes)


def _ordered(responses: Lengths, rows: float, alike: int) -> list[float]:
    """Responses of rows in the order in which they are packed, prompt by prompt: evenly spaced quantiles, of
    which each prompt has some at random (always the same)."""
    count = max(1, min(MOST_ROWS, ceil(rows)) // alike) * alike
    lengths = [responses.quantile((row + 0.5) / count) for row in range(count)]
    Random(0).shuffle(lengths)
    prompts = [sorted(lengths[row : row + alike], reverse=True) for row in range(0, count, alike)]
    return [length for prompt in sorted(prompts, reverse=True) for length in prompt]


def _fullest(work: Workload, rows: float, replicas: int, trains: bool) -> float:
    """How many times as many tokens as the mean replica the one has for which the others wait: the greatest
    of so many sums, each about normal (Blom, Statistical Estimates, 1958). Rows that are trained on are moved
    where it is more than `MOST_TOKENS`."""
    if replicas == 1:
        return 1.0
    deviations = NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25))
    of_prompts = work.prompts.variance * work.alike if work.prompts else 0.0  # rows share them
    of_responses = work.responses.variance if work.responses else 0.0
    found = 1 + deviations * sqrt((of_prompts + of_responses) / rows) / work.mean_sequence
    return min(found, MOST_TOKENS) if trains else found
