"""How many rows are generated at once, from the first token until the last row has ended, where rows end at
lengths of their own.

Lengths are drawn from one distribution, each by itself. Time is counted in tokens: steps that make one token
for every row in flight. What changes from step to step is taken as its mean over parts of the longest
response, so that all of a part is one price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, expm1, log1p, sqrt

from hflow.graph.lengths import Lengths

PARTS = 48  # of the longest response
STEADY = 8  # so many times the rows in flight, and what follows repeats itself


@dataclass(frozen=True)
class FlightPart:
    """`steps`: how many are expected in which any row of any replica is in flight, for which the others wait.
    `rows`: in flight on a replica, on average over the steps that it makes; `tokens`: of the response that
    each of them has by then."""

    steps: float
    rows: float
    tokens: float


@lru_cache(maxsize=8192)
def rows_in_flight(
    lengths: Lengths, rows: float, most: int, refills: bool, replicas: int = 1, in_step: int = 1
) -> tuple[FlightPart, ...]:
    """Of `replicas` that have `rows` rows each, `most` of them at once.

    Args:
        refills: a row begins as soon as another one ends; else in waves of `most`, the last of which may be
            smaller, and the next begins when the last row of one has ended.
        in_step: replicas that make each wave together, as those that share experts do.
    """
    if rows <= most:
        return tuple(_parts(lengths, [rows], replicas))
    if refills:
        later = max(0.0, rows - (STEADY + 1) * most)  # begin in a state that repeats itself
        steady = FlightPart(later * lengths.mean / most, most, lengths.mean_square / lengths.mean / 2)
        return (steady, *_parts(lengths, beginnings(lengths, rows - later, most), replicas))
    return tuple(_waves(lengths, rows, most, replicas, in_step))


def partial_rows_in_flight(
    lengths: Lengths, rows: float, most: int, begun: float
) -> tuple[tuple[FlightPart, ...], float]:
    """Of a replica that hands `rows` rows over when as many of `begun` times that number have ended, where
    the others go on in the next step; `most` at once. Beside it how many those are that have begun to be
    made.

    In steady state each row is as likely to end soon as any other: rows end as fast as the rows in flight
    divided by the mean length.
    """
    parts, taken = list[FlightPart](), rows / PARTS
    tokens = lengths.mean_square / lengths.mean / 2
    for number in range(PARTS):
        flight = min(most, begun * rows - (number + 0.5) * taken)
        parts.append(FlightPart(taken * lengths.mean / flight, flight, tokens))
    return tuple(parts), min(most, (begun - 1) * rows)


def _waves(lengths: Lengths, rows: float, most: int, replicas: int, in_step: int) -> Iterator[FlightPart]:
    """Replicas that are not in step wait for each other at the end alone. Of sums over waves, the longest
    exceeds the mean by as many standard deviations as of one wave, and these grow with the root of the number
    of waves."""
    waves = ceil(rows / most)
    for part in _parts(lengths, [most], in_step):
        yield replace(part, steps=(waves - 1) * part.steps)
    last = rows - most * (waves - 1)
    for alone, all_ in zip(_parts(lengths, [last], in_step), _parts(lengths, [last], replicas)):
        yield replace(alone, steps=alone.steps + sqrt(waves) * (all_.steps - alone.steps))


def beginnings(lengths: Lengths, rows: float, most: float) -> list[float]:
    """How many rows begin in each part of the time, as others end."""
    present = present_shares(lengths)
    begun: list[float] = []
    left = rows
    while left > 1e-9:
        recent = begun[-(PARTS - 1) :]
        there = sum(count * present[age] for age, count in enumerate(reversed(recent), 1))
        begun.append(min(left, max(0.0, most - there) / present[0]))
        left -= begun[-1]
    return begun


def _parts(lengths: Lengths, begun: list[float], replicas: int) -> Iterator[FlightPart]:
    """Of rows of which so many begin in each part of the time."""
    present, width = present_shares(lengths), lengths.longest / PARTS
    # Logarithms of the chance that a row has ended, of which those of rows are added.
    ended = [log1p(-share) if share < 1 else -float("inf") for share in present]
    for now in range(len(begun) + PARTS - 1):
        ages = range(max(0, now - len(begun) + 1), min(PARTS, now + 1))
        counts = [(age, begun[now - age]) for age in ages if begun[now - age] > 0]
        there = sum(count * present[age] for age, count in counts)
        if there <= 0:
            continue
        none = sum(count * ended[age] for age, count in counts)
        any_here, any_anywhere = -expm1(none), -expm1(none * replicas)
        tokens = sum(count * present[age] * (age + 0.5) * width for age, count in counts) / there
        yield FlightPart(width * any_anywhere, there / any_here, tokens)


@lru_cache(maxsize=256)
def present_shares(lengths: Lengths) -> tuple[float, ...]:
    """Of rows, which share is in flight in each part of the time since they began, on average over it."""
    width = lengths.longest / PARTS
    beyond = [lengths.excess(part * width) for part in range(PARTS + 1)]
    return tuple(min(1.0, max(0.0, (more - less) / width)) for more, less in pairwise(beyond))
