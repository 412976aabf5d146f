"""How often what was made of each row was right so far, and how likely that makes the row to be drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hflow.graph.row_sources import SuccessCurriculum
from hflow.runtime.row_order import RowNumbers


@dataclass
class SuccessRates:
    """Of the rows that a data node trains on, by their places among these.

    Attributes:
        curriculum: what the node's options say.
        tries, successes: float32 ``[rows]``; whole numbers unless the curriculum has a `decay`.
        drawn: the rows of the last steps, of which no step has seen yet what they gave, the oldest first;
            int64 ``[batch]`` each.
    """

    curriculum: SuccessCurriculum
    tries: NDArray[np.float32]
    successes: NDArray[np.float32]
    drawn: list[RowNumbers] = field(default_factory=list[RowNumbers])

    @staticmethod
    def of(curriculum: SuccessCurriculum, rows: int) -> SuccessRates:
        """Of rows that were never drawn."""
        return SuccessRates(curriculum, np.zeros(rows, np.float32), np.zeros(rows, np.float32))

    def count(self, values: Tensor) -> None:
        """Add what the step `lag` steps ago gave; nothing, as long as there was none.

        Args:
            values: float32 or bool ``[batch * k]``, those of one row lie together.
        """
        if len(self.drawn) < self.curriculum.lag:
            return
        rows = self.drawn.pop(0)
        right = values if values.dtype == torch.bool else values >= self.curriculum.threshold
        groups = right.cpu().numpy().reshape(len(rows), -1)
        decay = np.float32(self.curriculum.decay)
        self.tries[rows] = self.tries[rows] * decay + np.float32(groups.shape[1])
        self.successes[rows] = self.successes[rows] * decay + groups.sum(1).astype(np.float32)

    def estimates(self) -> NDArray[np.float64]:
        """The share of right responses of each row, as if `target` of one more had been right: a row that was
        never tried counts as one that is just hard enough."""
        successes, tries = self.successes.astype(np.float64), self.tries.astype(np.float64)
        return (successes + self.curriculum.target) / (tries + 1)

    def weights(self) -> NDArray[np.float64]:
        """``floor + (1 - floor) * x * (2 - x)`` where x is the nearness to `target`: 1 there, 0 where all
        responses are right or all wrong, linear between. With target 0.5, x * (2 - x) is 4 p (1 - p)."""
        share, target, floor = self.estimates(), self.curriculum.target, self.curriculum.floor
        near = np.minimum(share / target, (1 - share) / (1 - target))
        return floor + (1 - floor) * near * (2 - near)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the next step needs, by names of `hflow.plan.run_state`."""
        yield "tries", torch.from_numpy(self.tries.copy())
        yield "successes", torch.from_numpy(self.successes.copy())
        if self.drawn:
            yield "drawn", torch.from_numpy(np.stack(self.drawn))

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """Set what `tensors` has told.

        Raises:
            ValueError: it is of another number of rows.
        """
        tries, successes, drawn = kept.get("tries"), kept.get("successes"), kept.get("drawn")
        if tries is None or successes is None or {len(tries), len(successes)} != {len(self.tries)}:
            counted = 0 if tries is None else len(tries)
            raise ValueError(f"it has counts of {counted} rows, and there are {len(self.tries)} to train on")
        if drawn is not None and drawn.numel() and not 0 <= int(drawn.min()) <= int(drawn.max()) < len(tries):
            raise ValueError("it names rows that are not there")
        self.tries, self.successes = tries.numpy().copy(), successes.numpy().copy()
        self.drawn = [] if drawn is None else list(drawn.numpy().copy())
