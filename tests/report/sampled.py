"""Tables of samples, as runs keep them, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hflow.runtime.samples.files import FIXED

HOSTILE = "<script>alert(1)</script>\x1b[31mred\x1b[0m\x07 \u202eback"


def sample(**said: Any) -> dict[str, Any]:
    """A row; what is not said is as a run of GRPO leaves it."""
    usual = {"node": "rollout", "prompt": "1+1=", "response": "2", "length": 2, "finish": "eos", "version": 0}
    return {**dict.fromkeys(FIXED), "row": 0, "step": 0, **usual, **said}


def keep(run: Path, step: int, rows: Sequence[dict[str, Any]]) -> Path:
    """Write the samples of a step."""
    folder = run / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for r in rows for n in r)}
    columns["step"] = [step] * len(rows)
    table = pa.table({name: pa.array(values, FIXED.get(name)) for name, values in columns.items()})
    pq.write_table(table, folder / f"step-{step:06d}.parquet")
    return folder / f"step-{step:06d}.parquet"
