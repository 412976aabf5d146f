"""Published figures, and what is predicted of them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data/published.csv"


class UnpredictableError(Exception):
    """A row that the cost model says nothing of; the message is the reason."""


@dataclass(frozen=True)
class Row:
    """A published figure. `lacks`: what hflow has not, without which the row cannot be predicted."""

    system: str
    model: str
    gpu: str
    gpus: int
    kind: str
    setting: str
    figure: float
    unit: str
    fitted: bool
    lacks: str
    source: str

    @property
    def said(self) -> Mapping[str, str]:
        """The setting by key."""
        return dict(part.split("=", 1) for part in self.setting.split())

    def number(self, key: str) -> int:
        return int(self.said[key])


@dataclass(frozen=True)
class Prediction:
    """`predicted` in the row's unit, or `reason`."""

    row: Row
    predicted: float | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.row.figure - 1


def published_rows() -> list[Row]:
    lines = (line for line in DATA.read_text().splitlines() if not line.startswith("#"))
    return [
        Row(**{**r, "gpus": int(r["gpus"]), "figure": float(r["figure"]), "fitted": r["fitted"] == "yes"})
        for r in csv.DictReader(lines)
    ]
