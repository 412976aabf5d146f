"""Permutations of row numbers that are the same for every version of every library."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=4)
def permutation(size: int, seed: int, epoch: int, stream: int = 0, part: int = 0) -> NDArray[np.int64]:
    """A permutation of 0..size-1, fixed by (seed, epoch, stream, part) for every version of every library.

    Sorts the numbers by a counter-based hash (SplitMix64, Steele et al. 2014) of their index. Stream 0 and
    part 0 are not hashed in.

    Args:
        part: of the rows: a source of a mixture, or a block of those that are streamed.
    """
    key = f"{seed}/{epoch}" + f"/{stream}" * (stream > 0) + f"/source {part}" * (part > 0)
    return np.argsort(hashes(size, key), kind="stable")


def hashes(size: int, key: str) -> NDArray[np.uint64]:
    """Of the numbers 0..size-1, 64 random bits each, fixed by the key."""
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        z = np.uint64(start) + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
