"""Rows of CSV, JSON, Arrow folders, hub datasets and several files, against the `datasets` library and json;
and what is refused."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from hflow.diagnostics import HflowError
from hflow.runtime.csv_rows import csv_rows
from hflow.runtime.data_files import read_file
from hflow.runtime.hub_rows import all_rows, load_hub
from hflow.runtime.source_rows import read_sources

ROWS = [
    {"question": f'{a} + "1",\nplease', "answer": a + 1, "level": a / 4, "hint": None if a % 2 else f"é{a}"}
    for a in range(9)
]


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    yield


def sources(dataset: Any, **options: Any) -> dict[str, Any]:
    return {"dataset": dataset, "size": 5, "options": {}, **options}


def test_json_is_a_list_or_lines(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("list.json", "lines.json"):
        assert read_file(tmp_path / name) == ROWS
        theirs = datasets.load_dataset("json", data_files=str(tmp_path / name), split="train")
        assert isinstance(theirs, datasets.Dataset)
        assert theirs.to_list() == ROWS


def test_csv_is_what_the_datasets_library_reads_where_nothing_is_guessed(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, ["question", "answer", "level"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(ROWS)
    theirs = datasets.load_dataset("csv", data_files=str(file), split="train")
    assert isinstance(theirs, datasets.Dataset)
    assert read_file(file) == theirs.to_list()


def test_csv_keeps_what_readers_usually_guess() -> None:
    rows = csv_rows("id,answer,rate,n\r\n007,NA,1e3,3\r\n1.50,None,0.5,\r\n,,-0,-2\r\n")
    assert [row["id"] for row in rows] == ["007", "1.50", ""]
    assert [row["answer"] for row in rows] == ["NA", "None", ""]
    assert [row["rate"] for row in rows] == ["1e3", "0.5", "-0"]
    assert [row["n"] for row in rows] == [3, None, -2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "q,a\n1,2\n1,2,3\n", "row 1 of .*: 3 cells, but the first line names 2"),
        ("a.csv", "q,q\n1,2\n", "two columns are called `q`"),
        ("a.csv", "q,\n1,2\n", "the first line has an empty name"),
        ("a.csv", 'q,a\n1,2\n"1,2\n', "row 1 of .*: bad CSV"),
        ("a.json", '[{"a": 1}, 2]', "row 1 of .*: the list holds JSON objects"),
        ("a.json", '[{"a": 1}, {"a": 1, "a": 2}]', "duplicate key"),
        ("a.json", "[]", "has no rows"),
        ("a.json", '{"a": \n', "row 0 of .*bad JSON"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(HflowError, match=f"HF403.*{message}"):
        read_sources(sources(str(tmp_path / name)))


def test_several_files_are_one_dataset_and_rows_keep_their_places(tmp_path: Path) -> None:
    for name, rows in (("b.jsonl", ROWS[:4]), ("a.jsonl", ROWS[4:])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_sources(sources(f"{tmp_path}/*.jsonl"))
    assert list(found.rows) == ROWS[4:] + ROWS[:4], "by name"
    assert (
        found.where(4) == f"row 4 of `{tmp_path}/a.jsonl`"
        and found.where(5) == f"row 0 of `{tmp_path}/b.jsonl`"
    )
    assert list(read_sources(sources([f"{tmp_path}/b.jsonl", f"{tmp_path}/a.jsonl"])).rows) == ROWS
    with pytest.raises(HflowError, match=r"HF403.*no file is called `.*/c\*.jsonl`"):
        read_sources(sources(f"{tmp_path}/c*.jsonl"))


def test_columns_are_renamed_and_sources_marked(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "math.jsonl").write_text('{"problem": "2+2", "solution": "4", "source": "book"}\n')
    renames = {"problem": "question", "solution": "answer", "source": "origin"}
    entries = [
        {"path": str(tmp_path / "gsm8k.jsonl")},
        {"path": str(tmp_path / "math.jsonl"), "name": "hard", "rename_columns": renames},
    ]
    assert list(read_sources(sources(entries)).rows) == [
        {"question": "1+1", "answer": "2", "source": "gsm8k"},
        {"question": "2+2", "answer": "4", "origin": "book", "source": "hard"},
    ]
    for renamed, message in (
        ({"problem": "question"}, "has a field `source`.*rename_columns"),
        ({"problems": "question"}, "no field `problems` to rename.*did you mean `problem`"),
        ({"problem": "solution"}, "has a field `solution`, and another is renamed to it"),
    ):
        entries[1]["rename_columns"] = renamed
        with pytest.raises(HflowError) as caught:
            read_sources(sources(entries))
        assert re.search(message, str(caught.value).replace("\n", " "))


def test_arrow_folders_are_read_with_their_splits(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    whole.select([3, 1]).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(str(tmp_path / "both"))
    assert list(read_sources(sources(f"{tmp_path}/one")).rows) == [ROWS[3], ROWS[1]], "in the order selected"
    assert list(read_sources(sources(f"{tmp_path}/both", split="test")).rows) == ROWS[:1]
    for options, message in (
        ({"dataset": f"{tmp_path}/both"}, "has the splits train, test"),
        ({"dataset": f"{tmp_path}/both", "split": "tests"}, "did you mean `test`"),
        ({"dataset": f"{tmp_path}/one", "split": "train"}, "no splits"),
        ({"dataset": f"{tmp_path}/none"}, "no folder"),
        ({"dataset": f"{tmp_path}"}, "is no folder of `save_to_disk`"),
    ):
        with pytest.raises(HflowError, match="HF403") as caught:
            read_sources({**sources(""), **options})
        assert message in str(caught.value)


def test_a_hub_dataset_comes_from_the_cache(tmp_path: Path) -> None:
    """The cache of a dataset that was downloaded is that of one read from a file under the hub's name."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "made"))
    (made,) = (tmp_path / "made").glob("json/default-*/0.0.0/*/dataset_info.json")
    cached = tmp_path / "cache/org___sums/default/0.0.0" / made.parent.name
    shutil.copytree(made.parent, cached)
    (cached / "json-train.arrow").rename(cached / "sums-train.arrow")
    assert all_rows("org/sums", load_hub("org/sums", None, None, None)) == ROWS
    with pytest.raises(HflowError, match=r"HF403.*`org/sums` cannot be loaded.*"):
        load_hub("org/sums", None, "nonsense", None)


def test_a_hub_dataset_that_is_not_here_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(HflowError) as caught:
        load_hub("org/other", "main", "train[:10%]", None)
    (found,) = caught.value.diagnostics
    assert found.code == "HF403" and "cannot be reached and is not in the cache" in found.message
    assert "datasets.load_dataset('org/other', 'main', split='train[:10%]')" in found.help
    monkeypatch.chdir(tmp_path)
    Path("org/other").mkdir(parents=True)
    with pytest.raises(HflowError, match=r"HF403.*there is a folder of that name"):
        load_hub("org/other", None, None, None)


def test_the_library_is_not_imported_for_files() -> None:
    code = (
        "import sys, hflow.runtime.source_rows; sys.exit(not {'datasets', 'pandas'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
