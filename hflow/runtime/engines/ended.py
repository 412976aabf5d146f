"""How the responses of a generate node ended, and which rows are dropped for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hflow.graph.infer.kinds.generate import FINISH, KEPT, LENGTH, WAS_FINISHED
from hflow.graph.ir import Node
from hflow.runtime.ends import EndRule
from hflow.runtime.engines.sampler import Answers
from hflow.runtime.kept import KeptSets, joined_sets
from hflow.runtime.rows import Rows

OVERFLOWN, TRUNCATED = "overflown_rows", "truncated_rows"  # metrics


@dataclass(frozen=True)
class Ended:
    """`dropped`: bool ``[rows]``, whose masks are false everywhere. `counts`: of rows, by the reason for
    which they are dropped. `finish`: int32 ``[rows]``, and `kept`, where somebody wants them."""

    dropped: Tensor
    counts: Mapping[str, int]
    finish: Tensor | None = None
    kept: KeptSets | None = None

    @staticmethod
    def of(answers: Answers, ends: EndRule, node: Node) -> Ended:
        """Of one turn of `node`."""
        dropped, counts = torch.zeros(len(answers.tokens), dtype=torch.bool), dict[str, int]()
        finish = None
        if node.output(FINISH) or node.options.get("mask_truncated"):
            responses = answers.tokens.lists()
            finish = torch.tensor(ends.now(responses), dtype=torch.int32)
        if answers.overflown is not None:
            dropped |= answers.overflown
            counts[OVERFLOWN] = int(answers.overflown.sum())
        if finish is not None and node.options.get("mask_truncated"):
            dropped |= finish == LENGTH
            counts[TRUNCATED] = int((finish == LENGTH).sum())
        return Ended(dropped, counts, finish, answers.kept)

    def after(self, inputs: Mapping[str, Rows], observed: Rows, going: Tensor, sampled: Rows) -> Ended:
        """Of a whole conversation, of which this is the last turn, of the rows `going`. Where this turn may
        drop rows, one that an earlier turn dropped stays so.

        Args:
            inputs: of the node, with what earlier turns made.
            observed, sampled: observations, and what was sampled after them, of all rows.
        """
        dropped = torch.zeros(len(observed), dtype=torch.bool)
        if self.counts and len(observed):
            dropped = ~inputs["mask"].padded().any(1)
        dropped[going] |= self.dropped
        finish = None
        if self.finish is not None:
            finish = torch.full((len(observed),), WAS_FINISHED, dtype=torch.int32)
            finish[going] = self.finish
        if self.kept is None:
            return replace(self, dropped=dropped, finish=finish)
        earlier = KeptSets(inputs[KEPT], inputs["mask"].row_lengths)
        lengths = torch.zeros(len(observed), dtype=torch.int64)
        lengths[going] = self.kept.rows.row_lengths
        new = KeptSets(Rows(self.kept.rows.values, lengths), sampled.row_lengths)
        kept = joined_sets([earlier, KeptSets.empty(observed.row_lengths), new])
        return replace(self, dropped=dropped, finish=finish, kept=kept)

    def outputs(self, node: Node) -> dict[str, Rows]:
        """Those ports of `node` that say how its responses ended."""
        made: dict[str, Rows] = {}
        if node.output(FINISH):
            assert self.finish is not None
            made[FINISH] = Rows(self.finish)
        if node.output(KEPT):
            assert self.kept is not None, f"{node.name}: its engine tells no kept sets"
            made[KEPT] = self.kept.rows
        return made


def masked(mask: Rows, dropped: Tensor) -> Rows:
    """`mask`, ragged, false in all of the rows that are dropped."""
    return replace(mask, values=mask.values & ~dropped.repeat_interleave(mask.row_lengths))
