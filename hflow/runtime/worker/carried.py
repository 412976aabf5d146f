"""Loop-carried scalars: values of a step that later steps recall."""

from __future__ import annotations

from collections import deque

import torch

from hflow.runtime.rows import Rows


class Carried:
    """The last values, by name; the newest is the last step's."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[Rows]] = {}

    def keep(self, name: str, value: Rows, lag: int) -> None:
        """Add a step's value; those older than `lag` steps are dropped."""
        self._kept.setdefault(name, deque(maxlen=lag)).append(value)

    def recall(self, name: str, lag: int, init: float) -> Rows:
        """The value of `lag` steps ago, before this step has kept its own; `init` where there is none."""
        kept = self._kept.get(name, ())
        return kept[-lag] if lag <= len(kept) else Rows(torch.tensor([init], dtype=torch.float32))
