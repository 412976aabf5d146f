"""How little time something takes, by the memory that it may fill."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from hflow.compiler.candidates.node_groups import Candidate

NEVER = float("inf")


@dataclass(frozen=True)
class MemoryStairs:
    """From `needs[i]` bytes on, `seconds[i]` are enough; both are sorted, the needs rising."""

    needs: tuple[int, ...]
    seconds: tuple[float, ...]

    @staticmethod
    def of(steps: Iterable[tuple[int, float]]) -> MemoryStairs:
        """Of the least seconds that some bytes suffice for."""
        needs: list[int] = []
        seconds: list[float] = []
        for need, time_s in sorted(steps):
            if not seconds or time_s < seconds[-1]:
                needs.append(need)
                seconds.append(time_s)
        return MemoryStairs(tuple(needs), tuple(seconds))

    def joined(self, other: MemoryStairs) -> MemoryStairs:
        """Whichever of both is faster."""
        return MemoryStairs.of(chain(zip(self.needs, self.seconds), zip(other.needs, other.seconds)))

    def within(self, size_bytes: int) -> float:
        """Infinite where nothing does with so little."""
        number = bisect_right(self.needs, size_bytes)
        return self.seconds[number - 1] if number else NEVER


def node_steps(candidate: Candidate, number: int) -> Iterator[tuple[int, float]]:
    """Of node `number` of a node group: the bytes that the group keeps and the node needs, and its time."""
    for config in candidate.fronts[number].configs:
        yield candidate.idle_bytes + config.need_bytes, config.time_s + candidate.swap_s


def group_steps(candidate: Candidate, runs: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Of all its nodes, each of which runs so often."""
    needs = {config.need_bytes for front in candidate.fronts for config in front.configs}
    for need in needs:
        configs = [front.fastest(need) for front in candidate.fronts]
        times = [config.time_s + candidate.swap_s for config in configs if config]
        if len(times) == len(configs):
            yield candidate.idle_bytes + need, sum(n * time_s for n, time_s in zip(runs, times))
