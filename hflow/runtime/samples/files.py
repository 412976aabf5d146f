"""``RUN/samples/step-000010.parquet``: the samples of a step, as they are written and read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.run_config import SamplePolicy
from hflow.plan.plan import Plan
from hflow.plan.samples import sample_tables
from hflow.runtime.samples.parts import SamplePiece, SampleRequest, read_pieces
from hflow.whole_file import write_whole

FOLDER, PARTS = "samples", ".parts"
MEGABYTE = 10**6
FIXED = {  # columns of every table; None where nobody knows the value
    "step": pa.int64(),
    "node": pa.string(),
    "row": pa.int64(),
    "prompt": pa.string(),
    "response": pa.string(),
    "reward": pa.float32(),
    "advantage": pa.float32(),
    "logprob": pa.float32(),
    "length": pa.int32(),
    "finish": pa.string(),
    "version": pa.int64(),
    "data_row": pa.int64(),
}
_NAME = re.compile(r"step-(\d{6,18})\.parquet")


class SampleFiles:
    """Of one run: what is asked of workers, and what is made of their answers."""

    def __init__(self, run: Path, policy: SamplePolicy):
        self.folder, self.policy = run / FOLDER, policy

    def request(self, step: int, steps: int) -> SampleRequest | None:
        """What workers are asked for in one of a run's `steps` steps; None for nothing."""
        every = self.policy.every
        if not every or (step % every and step != steps - 1):
            return None
        return SampleRequest(str(self._parts(step).absolute()), self.policy.rows)

    def collect(self, plan: Plan, step: int, ranks: Sequence[int]) -> Path | None:
        """Write the samples of a step from the parts that these ranks have left; their file. None where the
        plan has none, or not one row is small enough to be kept.

        Raises:
            HflowError: HF407 when a part cannot be read, or the file not written.
        """
        folder = self._parts(step)
        pieces = [p for rank in ranks for p in read_pieces(folder / f"rank-{rank:05d}.arrow")]
        file = self._write(step, joined(plan, step, self.policy.rows, pieces)) if pieces else None
        shutil.rmtree(folder, ignore_errors=True)  # and no more: workers may be at later steps
        return file

    def close(self) -> None:
        """Remove parts that nobody waits for any more, when no worker writes any."""
        shutil.rmtree(self.folder / PARTS, ignore_errors=True)

    def cut(self, step: int) -> None:
        """Remove the samples of this step and of later ones, which are made again, and unfinished parts."""
        self.close()
        for at, file in sample_files(self.folder.parent).items():
            if at >= step:
                with suppress(OSError):  # it is written anew
                    file.unlink()

    def _parts(self, step: int) -> Path:
        return self.folder / PARTS / f"step-{step:06d}"

    def _write(self, step: int, table: pa.Table) -> Path | None:
        """The newest stay, as far as there is room; of a step that alone is too large, the first rows."""
        most = self.policy.keep_mb * MEGABYTE
        content = _parquet(table)
        while table.num_rows and len(content) > most:
            table = table.slice(0, table.num_rows // 2)
            content = _parquet(table)
        if not table.num_rows:
            return None
        self._make_room(most - len(content))
        file = self.folder / f"step-{step:06d}.parquet"
        write_whole(file, content, "HF407")
        return file

    def _make_room(self, most: float) -> None:
        files = sample_files(self.folder.parent)
        left = sum(file.stat().st_size for file in files.values())
        for file in files.values():
            if left <= most:
                return
            left -= file.stat().st_size
            file.unlink()


def joined(plan: Plan, step: int, most: int, pieces: Sequence[SamplePiece]) -> pa.Table:
    """The table of a step, of all its texts, one node after the other."""
    tables = sample_tables(plan.graph)
    parts = [
        _joined(step, t.node, min(t.rows, most), [p for p in pieces if p.table == n])
        for n, t in enumerate(tables)
    ]
    return pa.concat_tables(parts, promote_options="default")


def _joined(step: int, node: str, rows: int, pieces: Sequence[SamplePiece]) -> pa.Table:
    columns: dict[str, pa.Array] = {
        "step": pa.array([step] * rows, pa.int64()),
        "node": pa.array([node] * rows, pa.string()),
        "row": pa.array(range(rows), pa.int64()),
    }
    for name in dict.fromkeys(piece.column for piece in pieces):
        own = sorted((p for p in pieces if p.column == name), key=lambda piece: piece.first)
        columns[name] = pa.concat_arrays([piece.values for piece in own])
        assert len(columns[name]) == rows, (name, rows, [(p.first, len(p.values)) for p in own])
    fixed = {name: _typed(columns.get(name), kind, rows) for name, kind in FIXED.items()}
    others = {name: values for name, values in columns.items() if name not in FIXED}
    return pa.table(fixed | others)


def _typed(values: pa.Array | None, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind) if values is None else values.cast(kind)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def sample_files(run: Path) -> Mapping[int, Path]:
    """The files of a run by step, ascending."""
    with suppress(OSError):
        named = ((_NAME.fullmatch(path.name), path) for path in (run / FOLDER).iterdir())
        return dict(sorted((int(match[1]), path) for match, path in named if match))
    return {}


def read_samples(run: Path, step: int | None = None) -> pa.Table:
    """All samples that a run has kept, or those of one step; without any a table without rows.

    Raises:
        HflowError: HF407 when there are none of this step, or a file is damaged.
    """
    files = sample_files(run)
    if step is not None and step not in files:
        known = ", ".join(map(str, files))
        help_ = f"steps with samples: {known}" if known else "the run has kept no samples"
        raise HflowError(Diagnostic("HF407", f"`{run}` has no samples of step {step}", help=help_))
    tables = [_read(file) for at, file in files.items() if step in (None, at)]
    empty: Any = pa.table({name: pa.nulls(0, kind) for name, kind in FIXED.items()})
    return pa.concat_tables([empty, *tables], promote_options="permissive")


def _read(file: Path) -> pa.Table:
    try:
        return pq.ParquetFile(file).read()
    except (OSError, pa.ArrowException) as error:
        message = f"`{file}` is no table of samples: {error}"
        raise HflowError(Diagnostic("HF407", message)) from None
