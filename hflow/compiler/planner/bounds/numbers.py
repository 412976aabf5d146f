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


def known(each: Floats) -> Floats:
    """With 0 for NaN."""
    return np.where(np.isnan(each), 0.0, each)


@dataclass(frozen=True)
class Numbers(Generic[N]):
    """`zero`: like a given number; `most`, `least`: of some numbers; `machines_s`: of the busiest of some
    machines, see `one_machine_s`."""

    zero: Callable[[N], N]
    most: Callable[[Iterable[N]], N]
    least: Callable[[Iterable[N]], N]
    machines_s: Callable[[Sequence[Sequence[Job[N]]]], N]


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


def _busiest_of_floats(machines: Sequence[Sequence[Job[float]]]) -> float:
    return max(map(one_machine_s, machines), default=0.0)


def _busiest(machines: Sequence[Sequence[Job[Floats]]]) -> Floats:
    """Machines are side by side; those with fewer jobs than others do some that are nothing."""
    rows = max(map(len, machines))
    nothing = (_zeros(machines[0][0][0]),) * 3
    padded = [[*machine, *[nothing] * (rows - len(machine))] for machine in machines]
    columns = np.array([[job[i] for machine in padded for job in machine] for i in range(3)])
    heads, work, tails = columns.reshape(3, len(machines), rows, -1).swapaxes(1, 2).reshape(3, rows, -1)
    return one_machines_s(heads, work, tails).reshape(len(machines), -1).max(axis=0)


def _zeros(like: Floats) -> Floats:
    return np.zeros_like(like)


def _most(arrays: Iterable[Floats]) -> Floats:
    return reduce(_maximum, arrays)


def _least(arrays: Iterable[Floats]) -> Floats:
    return reduce(_minimum, arrays)


_maximum: Any = np.maximum
_minimum: Any = np.minimum
FLOATS = Numbers[float](lambda _: 0.0, max, min, _busiest_of_floats)
ARRAYS = Numbers[Floats](_zeros, _most, _least, _busiest)
