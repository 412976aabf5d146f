"""Errors of predictions: their summaries, as JSON and as the tables of docs/predictions.md."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from statistics import median
from typing import Any

from benchmarks.publications.predictions import PREDICT
from benchmarks.publications.rows import Prediction

BEGIN, END = "<!-- Tables: benchmarks/published.py -->\n", "<!-- End of tables -->\n"
USES = {True: "fitted", False: "held out"}
Json = dict[str, Any]


def report(found: Sequence[Prediction]) -> Json:
    """Summaries by kind and by system, and every row, the worst first within its kind."""
    told = [p for kind in PREDICT for p in worst_first(p for p in found if p.row.kind == kind)]
    return {
        "benchmark": "published",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "summaries": list(summaries(told)),
        "rows": [_json(p) for p in told],
    }


def worst_first(found: Iterable[Prediction]) -> list[Prediction]:
    """By what a prediction is off; those that there are none of come last."""
    return sorted(found, key=lambda p: -1.0 if p.error is None else abs(p.error), reverse=True)


def summaries(found: Sequence[Prediction]) -> Iterator[Json]:
    """Of fitted and of held-out rows: of each kind, and of each of its systems where there are several."""
    for kind in dict.fromkeys(p.row.kind for p in found):
        own = [p for p in found if p.row.kind == kind]
        systems = sorted({p.row.system for p in own})
        for system in ("all", *systems) if len(systems) > 1 else systems:
            for fitted in USES:
                rows = [p for p in own if p.row.fitted == fitted and system in ("all", p.row.system)]
                if rows:
                    yield {"kind": kind, "system": system, "use": USES[fitted], **spread(rows)}


def spread(found: Sequence[Prediction]) -> Json:
    """Median and 80th percentile of the absolute errors; the latter is the least error that at least 80 % of
    the rows keep to."""
    errors = sorted(abs(p.error) for p in found if p.error is not None)
    if not errors:
        return {"rows": 0, "not_predicted": len(found), "median": None, "p80": None}
    p80 = errors[ceil(0.8 * len(errors)) - 1]
    figures = {"median": round(median(errors), 4), "p80": round(p80, 4)}
    return {"rows": len(errors), "not_predicted": len(found) - len(errors), **figures}


def _json(p: Prediction) -> Json:
    row = p.row
    said = {"kind": row.kind, "system": row.system, "model": row.model, "gpu": row.gpu, "gpus": row.gpus}
    said |= {"setting": row.setting, "unit": row.unit, "figure": row.figure, "use": USES[row.fitted]}
    if p.predicted is None or p.error is None:
        return {**said, "reason": p.reason, "source": row.source}
    digits = 2 if p.predicted < 100 else 0 if p.predicted >= 1000 else 1
    return {
        **said,
        "predicted": round(p.predicted, digits),
        "error": round(p.error, 4),
        "source": row.source,
    }


def tables(result: Json) -> str:
    """The summary, a table for each kind, and what is not predicted, in Markdown."""
    rows: list[Json] = result["rows"]
    date = f"Made on {result['date']} ({result['machine']}).\n\n"
    summary = _table(
        ("what", "system", "rows are", "rows", "median error", "80% of rows within", "not predicted"),
        (_summary_cells(s) for s in result["summaries"]),
    )
    parts = [f"## Summary\n\n{date}{summary}"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind and "predicted" in row]
        if own:
            heads = (
                "error",
                "predicted",
                "published",
                "unit",
                "system",
                "model",
                "GPUs",
                "setting",
                "row is",
            )
            parts.append(f"## {_title(kind)}\n\n{_table(heads, (_row_cells(row) for row in own))}")
    if missing := [row for row in rows if "reason" in row]:
        heads = ("what", "system", "model", "GPUs", "setting", "published", "reason")
        parts.append(f"## Not predicted\n\n{_table(heads, (_missing_cells(row) for row in missing))}")
    sources = dict.fromkeys((row["system"], row["source"]) for row in rows)
    parts.append("## Sources\n\n" + "".join(f"- {system}: {source}\n" for system, source in sources))
    return "\n".join(parts)


def with_tables(page: str, made: str) -> str:
    """The page with other tables between its two marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + made + "\n" + END + rest.split(END)[1]


def _title(kind: str) -> str:
    return kind[0].upper() + kind[1:] if kind.islower() else f"{kind.removesuffix('s')}s"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _summary_cells(s: Json) -> list[str]:
    errors = ["-" if s[key] is None else f"{s[key]:.1%}" for key in ("median", "p80")]
    return [s["kind"], s["system"], s["use"], str(s["rows"]), *errors, str(s["not_predicted"])]


def _row_cells(row: Json) -> list[str]:
    figures = [f"{row['error']:+.1%}", f"{row['predicted']:,.6g}", f"{row['figure']:,.6g}", row["unit"]]
    return [*figures, row["system"], row["model"], _gpus(row), row["setting"], row["use"]]


def _gpus(row: Json) -> str:
    return f"{row['gpus'] or '?'} {row['gpu']}"


def _missing_cells(row: Json) -> list[str]:
    figure = f"{row['figure']:,.6g} {row['unit']}"
    place = [row["kind"], row["system"], row["model"], _gpus(row), row["setting"]]
    return [*place, figure, row["reason"]]
