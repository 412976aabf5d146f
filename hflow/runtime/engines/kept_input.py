"""Are kept sets those of the tokens that they came with?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hflow.runtime.engines.protocol import EngineCall, NodeError
from hflow.runtime.kept import KeptSets
from hflow.runtime.rows import Rows


def check_kept(call: EngineCall, inputs: Mapping[str, Rows]) -> None:
    """Raises NodeError for a response token that is not in its own set, unless that is empty."""
    if "kept" not in inputs:
        return
    tokens, lengths = inputs["tokens"], inputs["mask"].row_lengths
    sets = KeptSets(inputs["kept"], lengths)
    ends = tokens.row_lengths.cumsum(0)
    place = torch.arange(len(tokens.values))
    sampled = tokens.values[place >= (ends - lengths).repeat_interleave(tokens.row_lengths)]
    counts = sets.counts
    in_set = torch.zeros_like(counts).index_add_(
        0,
        torch.arange(len(counts)).repeat_interleave(counts),
        (sets.ids == sampled.repeat_interleave(counts)).to(torch.int64),
    )
    lacking = ((counts > 0) & (in_set == 0)).nonzero().squeeze(1)
    if len(lacking):
        row = int((lengths.cumsum(0) <= lacking[0]).sum()) + call.first_row
        raise NodeError(call.node.name, f"a token of row {row} is not in the set that `kept` has for it")
