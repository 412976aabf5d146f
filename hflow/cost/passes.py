"""Into how many micro-batches a replica cuts the rows that it trains on or scores, and their tokens.

Rows of one prompt that are in one micro-batch have its tokens once, and the last token of a response is not
read.

Where lengths are stated, that is what the engine does with rows of different lengths: a micro-batch holds as
many as need no more memory than `micro_batch` rows of the longest would, rows of one prompt together, longest
first, without padding; pipeline stages exchange tensors of one shape, so that all are padded to the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, gcd, sqrt
from random import Random
from statistics import NormalDist

from hflow.graph.lengths import Lengths
from hflow.plan.row_balance import MOST_TOKENS
from hflow.plan.workload import Workload

MOST_ROWS = 2048  # that are packed one by one; more are like these


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
    work: Workload, replicas: int, micro_batch: int, padded: bool, trains: bool, whole_rows: bool = False
) -> MicroBatches:
    """Of all rows of a score node, or those of one update of a train node.

    Args:
        replicas: over which the rows are spread.
        padded: to the largest micro-batch, as for pipeline stages.
        whole_rows: each row passes whole, with its prompt and its last token.
    """
    rows = (work.rows_per_update if trains else work.rows) / replicas
    alike = max(1.0, min(rows, work.alike_in_update if trains else work.alike))
    count, of_each, prompts, padding = _packed(work, rows, micro_batch, alike)
    prompts = 1.0 if whole_rows else prompts
    of_row = prompts * work.mean_prompt + work.mean_response - (0 if whole_rows else 1)
    if work.varies and replicas > 1:
        spread = sqrt(_variance(work, prompts**2 * alike) / rows) / of_row
        count *= _fullest(replicas, spread, trains)
        of_each = rows / count
    tokens = of_each * of_row
    return MicroBatches(count, tokens * padding if padded else tokens, of_each, of_each * prompts)


@lru_cache(maxsize=4096)
def _packed(work: Workload, rows: float, limit: int, alike: float) -> tuple[float, float, float, float]:
    """The number of micro-batches, their rows, how many prompts there are for each row, and how many times as
    many tokens as the mean the largest has.

    Args:
        alike: rows of each prompt.
    """
    if not work.varies:
        return ceil(rows / limit), limit, _prompts(limit, alike) / limit, 1.0
    if work.group > 1 or not work.responses:  # whole groups, or rows whose responses are all the greatest
        count, of_each = ceil(rows / limit), min(limit, rows)
        padding = _longest(work, rows, alike) / work.mean_sequence if work.prompts else 1.0
        return count, rows / count, _prompts(of_each, alike) / of_each, padding
    ordered = _ordered(work.responses, rows, round(alike))
    longest, sizes, prompts = _longest(work, rows, alike), list[float](), 0
    count, top, tokens = 0, 0.0, 0.0
    for row, response in enumerate(ordered):
        length = min(longest, work.mean_prompt + response)
        if count and (count + 1) * max(top, length) > limit * longest:
            sizes.append(tokens)
            count, top, tokens = 0, 0.0, 0.0
        begins = not count or row % round(alike) == 0
        prompts += begins
        count, top = count + 1, max(top, length)
        tokens += response + (work.mean_prompt if begins else 0.0)
    sizes.append(tokens)
    number = len(sizes) * max(1.0, rows / len(ordered))
    return number, rows / number, prompts / len(ordered), max(sizes) * len(sizes) / sum(sizes)


def _longest(work: Workload, rows: float, alike: float) -> float:
    """Of `rows` rows, the tokens of the longest."""
    if work.responses:
        return work.mean_prompt + work.responses.longest_of(rows)
    longest = work.prompts.longest_of(rows / alike) if work.prompts else work.prompt
    return longest + work.response


def _prompts(rows: float, alike: float) -> float:
    """Of a micro-batch of `rows` rows, where each prompt's `alike` rows follow each other: on average, those
    that begin in it and what is left of one that began before. Both begin on one grid, of whole rows."""
    of_prompt, step = Fraction(alike).limit_denominator(4096), 1.0
    if rows == round(rows):
        step = max(1.0, gcd(round(rows) * of_prompt.denominator, of_prompt.numerator) / of_prompt.denominator)
    return 1 + (rows - min(step, rows)) / alike


def _ordered(responses: Lengths, rows: float, alike: int) -> list[float]:
    """Responses of rows in the order in which they are packed, prompt by prompt: evenly spaced quantiles, of
    which each prompt has some at random (always the same)."""
    count = max(1, min(MOST_ROWS, ceil(rows)) // alike) * alike
    lengths = [responses.quantile((row + 0.5) / count) for row in range(count)]
    Random(0).shuffle(lengths)
    prompts = [sorted(lengths[row : row + alike], reverse=True) for row in range(0, count, alike)]
    return [length for prompt in sorted(prompts, reverse=True) for length in prompt]


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
