"""Damaged data files are refused with file and row."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hflow.diagnostics import HflowError
from hflow.runtime import data_files
from hflow.runtime.data_files import read_file

GOOD = '{"question": "1+1"}\n\n'


def refusal(path: Path) -> str:
    with pytest.raises(HflowError) as caught:
        read_file(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF403" and str(path) in diagnostic.message
    assert diagnostic.span is None or (diagnostic.span.file, diagnostic.span.line) == (str(path), 3)
    return diagnostic.message


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"question": "\\ud800"}', "has a lone surrogate"),
        ('{"\\udfff": 1}', "has a lone surrogate"),
        ('{"question": ' + "[" * 100_000, "nested deeper than 64 levels"),
        ('{"question": ' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64 levels"),
        ('{"question": "a", "question": "b"}', "duplicate key 'question'"),
        ('{"meta": {"a": 1, "a": 2}}', "duplicate key 'a'"),
        ('{"question": ' + "9" * 5000 + "}", "bad JSON"),
        ('{"question": "a"', "bad JSON"),
        ("[1]", "a line holds one JSON object, this one does not"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(GOOD + line + "\n")
    message = refusal(file)
    assert f"row 1 of `{file}`" in message and problem in message


def test_a_row_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(GOOD.encode() + b'{"question": "\xff"}\n')
    assert refusal(file) == f"row 1 of `{file}` is not UTF-8: invalid start byte"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_end_as_on_any_system(tmp_path: Path, end: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(end.join(b'{"a": "\xc2\x85\xe2\x80\xa8%d"}' % i for i in range(3)))
    assert read_file(file) == [{"a": f"\x85\u2028{i}"} for i in range(3)]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, suffix: str, kind: str) -> None:
    file = tmp_path / f"rows.{suffix}"
    make = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}
    make[kind](file)
    assert "no regular file" in refusal(file)


@pytest.mark.parametrize("name", ["a\0b.jsonl", "a" * 300 + ".jsonl"])
def test_an_impossible_name_is_refused(tmp_path: Path, name: str) -> None:
    assert re.search("no file|cannot be read", refusal(tmp_path / name))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_within_no_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Parquet of equal rows takes a few bytes, however many there are."""
    file = tmp_path / f"rows.{suffix}"
    rows = [{"question": "1"}] * 5000
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        assert file.stat().st_size < 1000
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    assert len(read_file(file)) == 5000
    monkeypatch.setattr(data_files, "MAX_ROWS", 4999)
    assert "has 5000 rows; at most 4999 are read" in refusal(file)
    monkeypatch.setattr(data_files, "MAX_BYTES", 100)
    if suffix == "jsonl":
        assert "larger than 100 bytes" in refusal(file)


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """One of them would be dropped."""
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["question", "question"]), file)
    assert "two columns called `question`" in refusal(file)


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([b"fine", b"\xff\xfe"]).view(pyarrow.string()),
        pyarrow.array([0, 2**62], pyarrow.timestamp("ms")),
    ],
    ids=["text", "date"],
)
def test_a_value_that_python_cannot_hold_is_named(tmp_path: Path, column: pyarrow.Array) -> None:
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table([column, [1, 2]], names=["question", "answer"]), file)
    assert f"row 1 of `{file}`: field `question` cannot be read" in refusal(file)


def test_a_column_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"]}), file, store_schema=False)
    file.write_bytes(file.read_bytes().replace(b"question", b"questio\xff"))
    assert "cannot be read" in refusal(file)
