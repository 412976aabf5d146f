"""Routes: for every token of a row the experts that the routers of a model chose, layer by layer.

A value ``i16[rows, seq~, choice]``. A row of `Rows` holds, token after token, the numbers of the experts in
the first layer that has experts, then those in the next one. The last token of a row is never an input of
the model, so nothing was chosen for it: it has `NONE`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hflow.runtime.engines.protocol import EngineCall, NodeError
from hflow.runtime.rows import Rows

NONE = -1


def check_routes(call: EngineCall, inputs: Mapping[str, Rows], choices: int, num_experts: int) -> None:
    """Raises NodeError for routes that are not of the tokens that they came with, or name no expert.

    Args:
        choices: experts that each token passes through, over all layers.
        num_experts: of a layer.
    """
    if "routes" not in inputs:
        return
    routes, lengths = inputs["routes"], inputs["tokens"].row_lengths
    apart = (routes.row_lengths != lengths * choices).nonzero().squeeze(1)
    if len(apart):
        row = int(apart[0]) + call.first_row
        raise NodeError(call.node.name, f"`routes` has not {choices} experts for each token of row {row}")
    values = routes.values.view(-1, choices)
    is_last = torch.zeros(len(values), dtype=torch.bool)
    is_last[lengths[lengths > 0].cumsum(0) - 1] = True
    if ((values[~is_last] < 0) | (values[~is_last] >= num_experts)).any():
        raise NodeError(call.node.name, f"`routes` names an expert that is none of {num_experts}")
