"""Streamed rows: draws against a plain reading of the whole file, whatever is filtered, cut, or resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.diagnostics import HflowError
from hflow.graph.ir import Node
from hflow.plan.run_state import DATA_STATE
from hflow.runtime.engines.protocol import NodeError, Result
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.permutation import permutation
from hflow.runtime.streamed_rows import PART, JsonLines, ParquetRows, open_stream
from tests.data.python_engine import TOKENIZER, call
from tests.data.test_data_nodes import data_node, dataset, lists, sums

SEED = 7  # of `call`


def streamed(source: Any, block: int = 5, **options: Any) -> Node:
    return data_node(source, holdout=0, streaming={"block": block}, **options)


def engine() -> PythonEngine:
    return PythonEngine({"actor": TOKENIZER})


def numbers(result: Result) -> list[int]:
    assert result.numbers is not None
    return result.numbers.tolist()


def drawn(engine: PythonEngine, node: Node, steps: int) -> list[list[int]]:
    """The numbers of the rows of some steps."""
    size = node.options["batch"]
    return [numbers(engine.run(call(node, (0, size), step), {})) for step in range(steps)]


def expected(kept: Sequence[int], block: int, size: int, steps: int, shuffle: bool) -> list[list[int]]:
    """As the documentation says: blocks of the kept rows, each in an order of its own, whole batches."""
    found: list[list[int]] = []
    epoch = 0
    while len(found) < steps:
        order: list[int] = []
        for number, start in enumerate(range(0, len(kept), block)):
            rows = kept[start : start + block]
            places = permutation(len(rows), SEED, epoch, 0, number) if shuffle else range(len(rows))
            order += [rows[int(place)] for place in places]
        found += [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        epoch += 1
    return found[:steps]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    levels=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    block=st.integers(1, 12),
    size=st.integers(1, 6),
    shuffle=st.booleans(),
    cuts=st.sets(st.integers(0, 11)),
    least=st.integers(0, 2),
)
def test_rows_are_those_of_a_plain_reading(
    tmp_path_factory: pytest.TempPathFactory,
    levels: list[int], block: int, size: int, shuffle: bool, cuts: set[int], least: int,
) -> None:  # fmt: skip
    """Of any file, filter, block and batch; and where the run goes on in another process after any step."""
    rows = [{**row, "level": level} for row, level in zip(sums(len(levels)), levels)]
    file = dataset(tmp_path_factory.mktemp("rows"), rows)
    node = streamed(file, block, batch=size, shuffle=shuffle, filter=f"level >= {least}")
    kept = [number for number, level in enumerate(levels) if level >= least]
    if len(kept) < size:
        with pytest.raises(NodeError, match=f"has {len(kept)} rows to train on .*, a batch needs {size}"):
            drawn(engine(), node, 1)
        return
    present, found = engine(), list[list[int]]()
    for step in range(12):
        found.append(numbers(present.run(call(node, (0, size), step), {})))
        if step in cuts:
            state = {name.rpartition("/")[2]: values for name, values in present.state()}
            present = engine()
            present.restore(node, state)
    assert found == expected(kept, block, size, 12, shuffle)


def test_in_one_block_rows_come_as_without_streaming(tmp_path: Path) -> None:
    file = dataset(tmp_path, sums(50))
    whole = data_node(file, holdout=0)
    assert drawn(engine(), streamed(file, 4096), 20) == drawn(engine(), whole, 20)
    assert drawn(engine(), streamed(file, 49), 20) != drawn(engine(), whole, 20)


def test_workers_draw_parts_of_the_same_batch(tmp_path: Path) -> None:
    node = streamed(dataset(tmp_path, sums(30)))
    for step, whole in enumerate(drawn(engine(), node, 9)):
        workers = [engine() for _ in range(2)]
        for before in range(step):
            for worker in workers:
                worker.run(call(node, (0, 1), before), {})
        parts = [numbers(w.run(call(node, at, step), {})) for w, at in zip(workers, ((0, 2), (2, 6)))]
        assert [row for part in parts for row in part] == whole


def test_values_are_those_of_the_rows(tmp_path: Path) -> None:
    """Rows of the second block, by their numbers."""
    rows = sums(40)
    source = engine()
    node = streamed(dataset(tmp_path, rows), 20)
    for step in range(6):
        result = source.run(call(node, (0, 6), step), {})
        texts = TOKENIZER.decode(lists(result.outputs["prompt"]))
        assert texts == [f"{rows[n]['meta']['sum']} = " for n in numbers(result)]
        assert result.outputs["answer"].strings() == [str(rows[n]["answer"]) for n in numbers(result)]
    assert any(n >= 20 for n in numbers(result))


def test_left_out_rows_are_counted_up_to_the_block(tmp_path: Path) -> None:
    """The third and seventh row are too long, the fifth is filtered; blocks end with rows 3, 6 and 9."""
    rows = [{**row, "level": 1} for row in sums(10)]
    rows[2]["meta"] = rows[6]["meta"] = {"sum": "9" * 40}
    rows[4]["level"] = 0
    node = streamed(dataset(tmp_path, rows), 3, batch=3, shuffle=False, filter="level > 0")
    source = engine()
    told = [source.run(call(node, (0, 3), step), {}).metrics for step in range(3)]
    counts = [(m.get("dropped_rows", (0,))[0], m.get("filtered_rows", (0,))[0]) for m in told]
    assert drawn(engine(), node, 3) == [[0, 1, 3], [5, 7, 8], [0, 1, 3]]
    assert counts == [(1, 0), (2, 1), (1, 0)]


# files -----------------------------------------------------------------------------------------


def table_file(folder: Path, rows: list[dict[str, Any]], group: int) -> str:
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=group)
    return str(file)


def test_all_kinds_of_files_give_the_same_rows_from_any_row_on(tmp_path: Path) -> None:
    """Of more rows than are read at once, in groups that do not divide them."""
    rows = sums(2 * PART + 300)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    sources = [dataset(tmp_path, rows), table_file(tmp_path, rows, 700), f"{tmp_path}/saved/"]
    for source in sources:
        stream = open_stream({"dataset": source})
        assert [file.count() for file in stream.files] == [len(rows)]
        for first in (0, 1, 699, 700, 701, PART, 2 * PART + 299, 2 * PART + 300, 9000):
            parts = list(stream.parts(first))
            assert [row for part in parts for row in part.rows.rows] == rows[first:]
            assert all(len(part.rows.rows) <= PART for part in parts)
            assert not parts or parts[0].first == first


def test_files_follow_each_other(tmp_path: Path) -> None:
    rows = sums(30)
    for number, (start, end) in enumerate(((0, 7), (7, 7), (7, 18), (18, 30))):
        lines = "".join(f"\n{json.dumps(row)}\r\n" for row in rows[start:end])
        (tmp_path / f"part_{number}.jsonl").write_text(lines, newline="")
    stream = open_stream({"dataset": f"{tmp_path}/part_*.jsonl"})
    for first in range(31):
        found = [(p.first + i, row) for p in stream.parts(first) for i, row in enumerate(p.rows.rows)]
        assert found == list(enumerate(rows))[first:]
    node = streamed(f"{tmp_path}/part_*.jsonl", 4, batch=3)
    assert drawn(engine(), node, 25) == expected(range(30), 4, 3, 25, True)


@pytest.mark.parametrize("cut", [0, 9])
def test_a_bad_row_is_named_by_its_place_in_its_file(tmp_path: Path, cut: int) -> None:
    """In the step that comes to it, and after a resumption in the middle of the file."""
    good = "".join(json.dumps(row) + "\n" for row in sums(25))
    (tmp_path / "a.jsonl").write_text(good)
    (tmp_path / "b.jsonl").write_text(f"{good}{json.dumps({'meta': {}, 'answer': 1})}\n")
    node = streamed([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"], 10, batch=2, shuffle=False)
    source = engine()
    drawn(source, node, cut)
    state = {name.rpartition("/")[2]: values for name, values in source.state()}
    if state:
        source = engine()
        source.restore(node, state)
    with pytest.raises(NodeError, match="row 25 of `.*b.jsonl`, prompt template"):
        drawn(source, node, 26)


def test_lines_are_bounded_and_files_regular(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hflow.runtime.streamed_rows.MAX_LINE_BYTES", 40)
    (tmp_path / "long.jsonl").write_text('{"a": 1}\n{"a": "' + "b" * 40 + '"}\n')
    with pytest.raises(HflowError, match="has a line of more than 40 bytes"):
        list(JsonLines(f"{tmp_path}/long.jsonl").parts(0))
    for kind, of in (("jsonl", JsonLines), ("parquet", ParquetRows)):
        (tmp_path / f"folder.{kind}").mkdir()
        with pytest.raises(HflowError, match="no regular file"):
            list(of(f"{tmp_path}/folder.{kind}").parts(0))


# state -----------------------------------------------------------------------------------------


def test_another_size_of_blocks_goes_on_with_the_block(tmp_path: Path) -> None:
    """From the first row of the one that was drawn from: no row of it is lost."""
    file = dataset(tmp_path, sums(60))
    source, node = engine(), streamed(file, 20, batch=5, shuffle=False)
    drawn(source, node, 5)
    state = {name.rpartition("/")[2]: values for name, values in source.state()}
    larger, node = engine(), streamed(file, 30, batch=5, shuffle=False)
    larger.restore(node, state)
    assert drawn(larger, node, 2) == [
        [*range(20, 25)],
        [*range(25, 30)],
    ]


@pytest.mark.parametrize("change", [{0: -1}, {3: 6}, {2: 1000, 3: 1}, "short"])
def test_a_position_of_other_rows_is_refused(tmp_path: Path, change: Any) -> None:
    node = streamed(dataset(tmp_path, sums(20)), 5, batch=2)
    source = engine()
    drawn(source, node, 3)
    ((name, position),) = source.state()
    assert name == f"{DATA_STATE}/prompts/position" and position.dtype == torch.int64
    bad = position[:4].clone() if change == "short" else position.clone()
    for place, value in {} if change == "short" else change.items():
        bad[place] = value
    with pytest.raises(ValueError, match="rows"):
        engine().restore(node, {"position": bad})


def test_evaluation_reads_the_first_rows_and_takes_none_from_the_step(tmp_path: Path) -> None:
    file = dataset(tmp_path, sums(30))
    node = streamed(file, 5)
    own = replace(streamed(file, 5, batch=8), name="prompts@test")
    source = engine()
    for step in range(5):
        assert numbers(source.run(call(own, (0, 8), step, evaluation=True), {})) == [*range(8)]
        assert numbers(source.run(call(node, (0, 6), step), {})) == drawn(engine(), node, 5)[step]
    assert [name for name, _ in source.state()] == [f"{DATA_STATE}/prompts/position"]
    with pytest.raises(NodeError, match="has 30 rows, evaluation `test` needs 31"):
        source.run(call(replace(own, options={**own.options, "batch": 31}), (0, 31), evaluation=True), {})


@pytest.mark.slow
def test_a_file_ten_times_as_long_takes_no_more_memory(tmp_path: Path) -> None:
    """By what Python has allocated at the peak; read whole, it would be nearly ten times as much."""
    import tracemalloc

    peaks: list[int] = []
    for count in (2_000, 20_000):
        rows = [{"meta": {"sum": f"{a % 90} + {a % 7}"}, "answer": a % 100} for a in range(count)]
        node = streamed(dataset(tmp_path, rows), 256, batch=64)
        source = engine()
        source.open(node)
        tracemalloc.start()
        for step in range(count // 64):
            source.run(call(node, (0, 64), step), {})
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0], np.array(peaks) / 2**20
