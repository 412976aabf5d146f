"""Damaged data files are refused with diagnostics, or all that is drawn from them is what they hold.

What they hold is read here again: JSON by Python alone, Parquet by pyarrow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hflow.diagnostics import HflowError
from hflow.graph.ir import Node, Output
from hflow.graph.types import Dim, Factor, ValueType
from hflow.runtime.engines.python.data import DataSource, open_source
from hflow.runtime.tokenizer import Tokenizer
from hflow.runtime.tools.new_model import ALPHABET, character_tokenizer
from tests.data.row_mutants import Rows, damaged_jsonl, damaged_parquet
from tests.limits import memory_limited_to

MUTANTS, CHUNKS = 300, 4
TOKENIZER = Tokenizer(character_tokenizer(ALPHABET), eos_id=1, pad_id=0)
ROWS: Rows = [
    {"question": f"{a}+{a % 7}", "answer": str(a + a % 7), "meta": {"sum": f"{a + a % 7}"}} for a in range(12)
]
BATCH = Factor("batch", 2, "prompts")


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    pyarrow.parquet.read_table  # noqa: B018  (its libraries are loaded before)
    with memory_limited_to(2 * 2**30):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_damaged_rows_are_refused_or_are_what_the_file_holds(tmp_path: Path, kind: str, chunk: int) -> None:
    accepted, file = 0, tmp_path / f"rows.{kind}"
    for seed in range(chunk * MUTANTS // CHUNKS, (chunk + 1) * MUTANTS // CHUNKS):
        if kind == "jsonl":
            file.write_bytes(damaged_jsonl(ROWS, seed))
        else:
            damaged_parquet(ROWS, seed, file)
        try:
            source = open_source(node(file), {"actor": TOKENIZER})
        except HflowError as error:
            assert {d.code for d in error.diagnostics} == {"HF403"} and str(file) in str(error), seed
            continue
        assert_held(source, rows_of(file), seed)
        accepted += 1
    assert 0 < accepted < MUTANTS // CHUNKS * 2 // 3  # most are damaged indeed, and some are not


def test_the_rows_themselves_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    assert_held(open_source(node(file), {"actor": TOKENIZER}), ROWS, 0)


def node(file: Path) -> Node:
    options = {
        "dataset": str(file), "batch": 2, "holdout": 2, "tokenizer": "actor", "shuffle": True, "size": 1,
        "options": {}, "prompt": "{{ question }}={{ meta.sum }}", "response": "{{ answer }}",
        "max_prompt_tokens": 32, "max_response_tokens": 16,
    }  # fmt: skip
    return Node(
        "prompts", "data", outputs=(Output("answer", ValueType("str", (Dim((BATCH,)),))),), options=options
    )


def rows_of(file: Path) -> Rows:
    if file.suffix == ".parquet":
        return pyarrow.parquet.ParquetFile(file).read().to_pylist()
    return [json.loads(line) for line in file.read_bytes().splitlines() if line.strip()]


def assert_held(source: DataSource, rows: Rows, seed: int) -> None:
    """Every row is drawn, held out or counted, and says what stands in the file."""
    data = source.dataset
    drawn = (*data.train, *data.held_out)
    assert len(drawn) + data.duplicates + data.too_long + data.set_aside == len(rows), seed
    for example in drawn:
        row = rows[example.number]
        prompt, answer = text(row["question"]) + "=" + text(row["meta"]["sum"]), text(row["answer"])
        assert TOKENIZER.decode([example.prompt]) == [example.key] == [prompt], seed
        assert TOKENIZER.decode(example.responses) == [answer] and example.fields == {
            "answer": column(row)
        }, seed
        assert 0 < len(example.prompt) <= 32 and all(len(r) <= 16 for r in example.responses)


def text(value: Any) -> str:
    """What Python writes, of whatever has no null and no number in it that is none."""
    if isinstance(value, dict | list | tuple):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            text(inner)
    assert value is not None and not isinstance(value, bytes)
    assert not isinstance(value, float) or math.isfinite(value)
    return str(value)


def column(row: dict[str, Any]) -> str:
    value = row["answer"]
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    assert isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value)
