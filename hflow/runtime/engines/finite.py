"""Numbers of a model that are not finite are refused where they arise: later nobody knows their row."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hflow.runtime.engines.sampler import NotFinite
from hflow.runtime.rows import Rows, row_of


def check_logits(logits: Tensor, ids: Tensor, step: int) -> None:
    """Before sampling: of NaN any token may be drawn, or one that is outside the vocabulary.

    Args:
        ids: the global number of each row.

    Raises:
        NotFinite: for the first logit that is not finite.
    """
    if logits.sum().isfinite() or logits.isfinite().all():  # a sum reads them once and writes nothing
        return
    row, token = (~logits.isfinite()).nonzero()[0].tolist()
    value = float(logits[row, token])
    raise NotFinite(f"a logit before response token {step} of row {int(ids[row])} is {value}")


def not_finite(outputs: Mapping[str, Rows], first_row: int) -> str:
    """The first number that is not finite, by the global number of its row; empty where all are."""
    for name, rows in outputs.items():
        bad = (~rows.values.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            row = first_row + (at if rows.lengths is None else row_of(rows.lengths, at))
            return f"`{name}` of row {row} is {float(rows.values[at])}"
    return ""
