"""How many tokens the KV cache of an engine must have room for.

Most have room for each row at its greatest length. One that keeps what its rows have so far in pages of one
pool needs less where lengths are stated: rows in flight are of various ages. The pool has room for one row at
its greatest length, which an engine wants free when it begins a row, and for what all others hold when they
are expected to hold most, but for a chance of `RUNS_OVER`. They are independent of each other, so that what
they hold together is about normal: n times the mean of one, and the deviation of one times the root of n.

Where a pool runs over all the same, the engine retracts a row: it drops its keys and values, and reads it
again when there is room (PagedAttention, arXiv:2309.06180, section 4.5; `retract_decode` in SGLang). That
takes time and no memory, so that a plan which fits does whatever the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from statistics import NormalDist

from hflow.cost.rows_in_flight import PARTS, STEADY, beginnings, present_shares
from hflow.graph.lengths import Lengths
from hflow.plan.engine_registry import GenerationEngine, profile_of
from hflow.plan.workload import Workload

RUNS_OVER = 0.01
_DEVIATIONS = NormalDist().inv_cdf(1 - RUNS_OVER)


@dataclass(frozen=True)
class _HeldTokens:
    """At one time, of as many rows as are in flight at most: which share of them there is, and of a row's
    tokens, none of one that has ended, the mean and the mean square."""

    share: float
    mean: float
    mean_square: float


@lru_cache(maxsize=65536)
def cache_tokens(work: Workload, replicas: int, rows: int, engine: GenerationEngine) -> int:
    """Of a replica that has `rows` rows in flight at most."""
    greatest = rows * work.sequence
    if not (work.varies and profile_of(engine).pages):
        return greatest
    share = work.rows / replicas
    others = min(rows, share) - 1
    lengths = work.responses or Lengths(work.response, work.response)
    held = _held(lengths, work.mean_prompt, min(STEADY + 1.0, max(1.0, share / rows)))
    prompts = work.prompts.variance * min(work.alike, share) if work.prompts else 0.0  # rows share them
    most = max(others * at.mean + _DEVIATIONS * sqrt(others * _variance(at, prompts)) for at in held)
    return min(greatest, work.sequence + ceil(most - 1e-6))


def _variance(held: _HeldTokens, prompts: float) -> float:
    return max(0.0, held.mean_square - held.mean**2 + held.share * prompts)


@lru_cache(maxsize=4096)
def _held(lengths: Lengths, prompt: float, turns: float) -> tuple[_HeldTokens, ...]:
    """In each part of the time, counted with the tokens that rows have at its end.

    Args:
        turns: so many times as many rows as are in flight at most begin, each when another has ended.
    """
    present, width = present_shares(lengths), lengths.longest / PARTS
    begun = beginnings(lengths, turns, 1.0)
    found: list[_HeldTokens] = []
    for now in range(len(begun) + PARTS - 1):
        ages = range(max(0, now - len(begun) + 1), min(PARTS, now + 1))
        rows = [(begun[now - age] * present[age], prompt + (age + 1) * width) for age in ages]
        mean = sum(share * tokens for share, tokens in rows)
        square = sum(share * tokens**2 for share, tokens in rows)
        found.append(_HeldTokens(min(1.0, sum(share for share, _ in rows)), mean, square))
    return tuple(found)
