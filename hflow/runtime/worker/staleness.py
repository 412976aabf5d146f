"""How old the texts are that a train node learns from: measured, where the types only promise (HF223).

The version of a model's weights is the number of steps that have trained it. It goes with the weights to
their readers, and with every text that these sample: a text is as old as its oldest turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from hflow.graph.infer.regions import maker
from hflow.graph.ir import Graph, Node
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import Rows

UNKNOWN = -1  # of texts that no model of the run sampled


def versions(rows: Rows) -> torch.Tensor:
    """int64 ``[rows]``, `UNKNOWN` where nobody tells."""
    return torch.full((len(rows),), UNKNOWN) if rows.versions is None else rows.versions


def sampled(texts: Rows, version: int, before: Iterable[Rows], of_tokens: Rows | None = None) -> Rows:
    """`texts` with the version of the weights that sampled them: that of the oldest of their tokens, where
    these have their own, or of the turns `before`, if older."""
    oldest = torch.full((len(texts),), version) if of_tokens is None else _oldest(of_tokens, version)
    for rows in before:
        if rows.versions is not None and len(rows) == len(texts):
            told = torch.where(rows.versions == UNKNOWN, version, rows.versions)
            oldest = torch.minimum(oldest, told)
    return replace(texts, versions=oldest)


def _oldest(of_tokens: Rows, version: int) -> torch.Tensor:
    """int64 ``[rows]``; `version` for a row without tokens."""
    return torch.tensor([min(row, default=version) for row in of_tokens.lists()], dtype=torch.int64)


def staleness(graph: Graph, node: Node, texts: Rows, version: int) -> torch.Tensor:
    """How many updates older than `version` the weights were that sampled each text; int64, of those texts
    only that the model sampled which `node` trains.

    Raises:
        NodeError: HF409 when a text is older than the node's `max_lag` allows.
    """
    if not _own(graph, node):
        return torch.empty(0, dtype=torch.int64)
    told = versions(texts)
    ages = version - told[told != UNKNOWN]
    allowed = node.options["max_lag"]
    if len(ages) and int(ages.max()) > allowed:
        count, oldest = int((ages > allowed).sum()), int(ages.max())
        message = f"{count} of {len(ages)} texts are up to {oldest} updates old; `max_lag` is {allowed}"
        raise NodeError(node.name, message, "HF409")
    return ages


def _own(graph: Graph, node: Node) -> bool:
    """Whether the texts that a train node reads were sampled, in a region or not, by the model that it
    trains."""
    type_ = next(v.type for v in node.inputs if v.port == "tokens")
    name = maker(type_.dims[-1].factors[0].origin or "")
    found = next((n for n in graph.nodes if n.name == name), None)
    return bool(found and found.model and node.model and found.model.model == node.model.model)
