"""The samples of a step that lie on one worker: what it has made of the rows whose values it hands over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from hflow.graph.infer.kinds.generate import FINISHES, LENGTH
from hflow.graph.ir import Ref
from hflow.plan.plan import Plan
from hflow.plan.samples import SampleColumn, SampleTable, data_rows, sample_tables, sampled_rows
from hflow.runtime.ends import EndRule
from hflow.runtime.rows import Rows
from hflow.runtime.samples.parts import SamplePiece, write_pieces
from hflow.runtime.tokenizer import Tokenizer
from hflow.runtime.worker.staleness import UNKNOWN, versions

Kept = tuple[int, Rows]  # the number of the first row, and the rows


class SampleParts:
    """Of one step. `most` rows of each table are kept, the first ones."""

    def __init__(self, plan: Plan, rank: int, most: int):
        self._tables, self._rank, self._most = sample_tables(plan.graph), rank, most
        self._options = {table.maker: plan.graph.node(table.maker).options for table in self._tables}
        self._kept: dict[Ref, Kept] = {}
        self._numbers: dict[str, tuple[int, Tensor]] = {}
        wanted = _limits(self._tables, most)
        self._shares = {
            ref: (share, wanted[ref]) for ref in wanted if (share := sampled_rows(plan, ref).get(rank))
        }
        drawn = {table.data: data_rows(plan, table.data) for table in self._tables if table.data}
        self._drawn = {node: rows[rank] for node, rows in drawn.items() if rank in rows}

    def take(self, node: str, outputs: Mapping[str, Rows], numbers: Tensor | None = None) -> None:
        """Keep of a node's rows on this worker what samples have of them."""
        for port, rows in outputs.items():
            share = self._shares.get(Ref(node, port))
            if share is None:
                continue
            (start, stop), limit = share
            if start < limit:
                self._kept[Ref(node, port)] = start, _on_host(rows.slice(0, min(stop, limit) - start))
        if numbers is not None and node in self._drawn:
            self._numbers[node] = self._drawn[node][0], numbers

    def write(self, folder: Path, tokenizer: Callable[[str], Tokenizer]) -> bool:
        """Write a file into `folder` where there is something to write; whether there was. HF407 when that is
        not possible. `tokenizer`: that of a model."""
        pieces = [p for n, table in enumerate(self._tables) for p in self._pieces(n, table, tokenizer)]
        if pieces:
            write_pieces(folder / f"rank-{self._rank:05d}.arrow", pieces)
        return bool(pieces)

    def _pieces(
        self, number: int, table: SampleTable, tokenizer: Callable[[str], Tokenizer]
    ) -> Iterator[SamplePiece]:
        if table.tokens in self._kept:
            first, tokens = self._kept[table.tokens]
            mask = self._kept[table.mask][1] if table.mask else None
            used, options = tokenizer(table.tokenizer), self._options[table.maker]
            ends = EndRule.of(options, used.eos_id, used.decode)
            for name, values in _texts(tokens, mask, used, ends).items():
                if name != "finish" or table.finish is None:
                    yield SamplePiece(number, name, first, values)
        if table.data in self._numbers:
            first, numbers = self._numbers[table.data]
            yield self._repeated(
                number, table, "data_row", first, pa.array(numbers.tolist()), table.data_repeats
            )
        if table.finish in self._kept:
            first, rows = self._kept[table.finish]
            told = [FINISHES[finish] for finish in rows.values.tolist()]
            yield SamplePiece(number, "finish", first, pa.array(told, pa.string()))
        for column in table.columns:
            if column.value in self._kept:
                first, rows = self._kept[column.value]
                values = _column(column, rows, self._kept.get(table.mask) if table.mask else None)
                yield self._repeated(number, table, column.name, first, values, column.repeats)

    def _repeated(
        self, number: int, table: SampleTable, name: str, first: int, values: pa.Array, repeats: int
    ) -> SamplePiece:
        """`values` begin with number `first` of their own; what is beyond the kept rows is cut off."""
        begin = first * repeats
        count = max(0, min(len(values) * repeats, min(table.rows, self._most) - begin))
        if repeats > 1 or count < len(values):
            values = values.take(pa.array([row // repeats for row in range(count)], pa.int64()))
        return SamplePiece(number, name, begin, values)


def _limits(tables: tuple[SampleTable, ...], most: int) -> dict[Ref, int]:
    """How many rows of each value are wanted, of `most` rows of each table."""
    found: dict[Ref, int] = {}
    for table in tables:
        wanted = [(ref, 1) for ref in (table.tokens, table.mask, table.finish) if ref]
        for ref, repeats in wanted + [(column.value, column.repeats) for column in table.columns]:
            found[ref] = max(found.get(ref, 0), -(-most // repeats))
    return found


def _on_host(rows: Rows) -> Rows:
    """A copy that shares no memory with what it is taken from."""
    lengths, told = rows.lengths, rows.versions
    return Rows(
        rows.values.cpu().clone(),
        None if lengths is None else lengths.cpu().clone(),
        None if told is None else told.cpu().clone(),
    )


def _texts(tokens: Rows, mask: Rows | None, tokenizer: Tokenizer, ends: EndRule) -> dict[str, pa.Array]:
    """What the tokens of whole sequences say. Without a mask all of a sequence counts as the response."""
    rows = tokens.lists()
    lengths = [len(row) for row in rows] if mask is None else mask.row_lengths.tolist()
    cuts = [len(row) - length for row, length in zip(rows, lengths, strict=True)]
    responses = [row[cut:] for row, cut in zip(rows, cuts)]
    finishes = [ends.now([row])[0] if row else LENGTH for row in responses]
    told = versions(tokens).tolist()
    return {
        "prompt": pa.array(tokenizer.decode([row[:cut] for row, cut in zip(rows, cuts)]), pa.string()),
        "response": pa.array(tokenizer.decode(responses), pa.string()),
        "length": pa.array(lengths, pa.int32()),
        "finish": pa.array([FINISHES[finish] for finish in finishes], pa.string()),
        "version": pa.array([None if version == UNKNOWN else version for version in told], pa.int64()),
    }


def _column(column: SampleColumn, rows: Rows, mask: Kept | None) -> pa.Array:
    if column.how == "value":
        return _array(rows)
    padded = rows.padded().double()  # float32 sums depend on the order
    if column.how == "mean":
        return pa.array((padded.sum(1) / rows.row_lengths.clamp(min=1)).tolist(), pa.float32())
    if mask is None:
        return pa.array(padded.sum(1).tolist(), pa.float32())
    counted = mask[1].padded()
    sums = (padded * counted).sum(1).tolist()
    return pa.array([s if any_ else None for s, any_ in zip(sums, counted.any(1).tolist())], pa.float32())


def _array(rows: Rows) -> pa.Array:
    """One value per row."""
    if rows.lengths is not None:
        return pa.array(rows.strings(), pa.string())
    kinds = {torch.float32: pa.float32(), torch.int32: pa.int32(), torch.bool: pa.bool_()}
    return pa.array(rows.values.tolist(), kinds.get(rows.values.dtype, pa.float32()))
