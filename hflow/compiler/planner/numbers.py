"""Bounds are computed for one choice, in floats, or for many at once, in arrays with a value for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
N = TypeVar("N", float, Floats)
Job = tuple[N, N, N]  # its earliest start, its work, the least time that follows it


@dataclass(frozen=True)
class Numbers(Generic[N]):
    """`zero`: like a given number; `most`, `least`: of some numbers; `machine_s`: see `one_machine_s`."""

    zero: Callable[[N], N]
    most: Callable[[Iterable[N]], N]
    least: Callable[[Iterable[N]], N]
    machine_s: Callable[[Sequence[Job[N]]], N]


def one_machine_s(jobs: Sequence[Job[float]]) -> float:
    """What a machine that does one job at a time needs at least (Carlier 1982): for all jobs that start no
    earlier and are followed by no less than some, the earliest start, their work, the least that follows."""
    best, late_first = 0.0, sorted(jobs, reverse=True)
    for _, _, least in jobs:
        total = 0.0
        for head, work, tail in late_first:
            if tail >= least:
                total += work
                best = max(best, head + total + least)
    return best


def one_machines_s(heads: Floats, work: Floats, tails: Floats) -> Floats:
    """The same for many choices: rows are jobs, columns choices."""
    order = np.argsort(-heads, axis=0)
    columns = np.arange(int(heads.shape[1]))
    heads, work, tails = (each[order, columns] for each in (heads, work, tails))
    counts = tails[None] >= tails[:, None]  # by job: those that are followed by no less
    ends = heads + np.cumsum(np.where(counts, work, 0.0), axis=1) + tails[:, None]
    return np.where(counts, ends, 0.0).max(axis=(0, 1))


def _of_jobs(jobs: Sequence[Job[Floats]]) -> Floats:
    heads, work, tails = (np.stack(each) for each in zip(*jobs))
    return one_machines_s(heads, work, tails)


def _zeros(like: Floats) -> Floats:
    return np.zeros_like(like)


def _most(arrays: Iterable[Floats]) -> Floats:
    return reduce(_maximum, arrays)


def _least(arrays: Iterable[Floats]) -> Floats:
    return reduce(_minimum, arrays)


_maximum: Any = np.maximum
_minimum: Any = np.minimum
FLOATS = Numbers[float](lambda _: 0.0, max, min, one_machine_s)
ARRAYS = Numbers[Floats](_zeros, _most, _least, _of_jobs)
