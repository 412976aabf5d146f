"""``lengths.json`` of a run folder: the lengths that each data and generate node of the step saw."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, isfinite
from pathlib import Path
from typing import Any, cast

from hflow.bounded_read import UnreadableError, read_json
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.lengths import QUANTILES, ImpossibleLengthsError, Lengths

FILE = "lengths.json"
_VERSION = 1
_MAX_BYTES = 2**22
_GREATEST = 2**31


@dataclass(frozen=True)
class SeenLengths:
    """Of the `rows` texts that a node has made: prompts of a data node, responses of a generate node."""

    rows: int
    lengths: Lengths

    @staticmethod
    def of(counts: Mapping[int, int], greatest: int) -> SeenLengths:
        """Of texts of which `counts` has so many of each length; at least one.

        Quantiles are lengths of texts: the least one that such a share of them does not exceed.
        """
        lengths = sorted(counts)
        up_to = [*accumulate(counts[length] for length in lengths)]
        rows = up_to[-1]
        at = {key: lengths[bisect_left(up_to, max(1, ceil(p * rows)))] for key, p in QUANTILES.items()}
        mean = sum(length * count for length, count in counts.items()) / rows
        return SeenLengths(rows, Lengths(mean, greatest, tuple((k, float(n)) for k, n in at.items())))

    def fields(self) -> dict[str, Any]:
        own = self.lengths
        quantiles = {key: int(tokens) for key, tokens in own.quantiles}
        return {"rows": self.rows, "greatest": own.greatest, "mean": own.mean, **quantiles}


def lengths_text(seen: Mapping[str, SeenLengths]) -> str:
    """The file's text."""
    nodes = {name: each.fields() for name, each in seen.items()}
    return json.dumps({"version": _VERSION, "nodes": nodes}, indent=2) + "\n"


def read_lengths(folder: Path) -> dict[str, SeenLengths]:
    """Of each node of the run in `folder`.

    Raises:
        UnreadableError: there is no such file, or it does not say this.
    """
    try:
        return _nodes(read_json(folder / FILE, _MAX_BYTES))
    except (KeyError, TypeError, ValueError, ImpossibleLengthsError):
        raise UnreadableError("json", "it does not say what a run's lengths were") from None


def seen_in(folder: Path) -> dict[str, SeenLengths]:
    """As `read_lengths`; nothing where a run has left no such file, as before its first step. HF407 where the
    file is damaged."""
    try:
        return read_lengths(folder)
    except UnreadableError as error:
        if error.reason == "missing":
            return {}
        raise HflowError(Diagnostic("HF407", f"`{folder / FILE}`: {error}")) from None


def _nodes(said: Any) -> dict[str, SeenLengths]:
    if said["version"] != _VERSION:
        raise ValueError(said["version"])
    nodes = cast("dict[str, dict[str, Any]]", said["nodes"])
    return {name: _seen(fields) for name, fields in nodes.items()}


def _seen(fields: dict[str, Any]) -> SeenLengths:
    rows, greatest = fields["rows"], fields["greatest"]
    numbers = {name: float(fields[name]) for name in ("mean", *QUANTILES)}
    if not (isinstance(rows, int) and isinstance(greatest, int) and 0 < greatest < _GREATEST):
        raise ValueError(fields)
    if not all(isfinite(number) and number >= 0 for number in numbers.values()):
        raise ValueError(fields)
    return SeenLengths(rows, Lengths.of(greatest, numbers.pop("mean"), numbers))
