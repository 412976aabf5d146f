from __future__ import annotations

import hashlib
import json
import sys
from itertools import combinations
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.diagnostics import HflowError
from hflow.runtime.datasets import Dataset, hold_out, read_rows
from hflow.runtime.permutation import permutation

RECORDED = [5, 6, 1, 2, 3, 4, 9, 8, 0, 10, 7, 11]
ROWS = [{"question": f"{a} + 1", "answer": str(a + 1), "level": {"digits": 1}} for a in range(9)]


def split(rows: list[str], count: int) -> Dataset[str]:
    return hold_out("rows", rows, str, str, count)


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.text(max_size=3), min_size=1, max_size=30), st.data())
def test_no_held_out_row_is_ever_trained_on(rows: list[str], data: st.DataObject) -> None:
    distinct = len(set(rows))
    count = data.draw(st.integers(0, distinct - 1))
    dataset = split(rows, count)
    assert len(dataset.held_out) == count and len(dataset.train) == distinct - count
    assert set(dataset.held_out) | set(dataset.train) == set(rows)
    assert set(dataset.held_out).isdisjoint(dataset.train)


@settings(max_examples=50, derandomize=True)
@given(st.permutations([f"row {i}" for i in range(12)]), st.integers(0, 11))
def test_what_is_held_out_depends_on_content_alone(rows: list[str], count: int) -> None:
    expected = split([f"row {i}" for i in range(12)], count)
    assert split(rows, count).held_out == expected.held_out
    more = split([f"row {i}" for i in range(12)], 11)
    assert more.held_out[:count] == expected.held_out, "holding out more keeps what was held out"


def test_training_rows_keep_the_order_of_the_file() -> None:
    train = split(["b", "a", "b", "c", "a", "d"], 1).train
    assert list(train) == [row for row in ["b", "a", "c", "d"] if row in train]


@settings(max_examples=100, derandomize=True)
@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 9))
def test_permutation_is_one(size: int, seed: int, epoch: int, stream: int) -> None:
    assert sorted(permutation(size, seed, epoch, stream)) == list(range(size))


def test_permutations_are_fair() -> None:
    """Chi-squared over where row 0 lands in 4,000 epochs: 7 degrees of freedom, p = 0.001 at 24.3."""
    places = [0] * 8
    for epoch in range(4000):
        places[list(permutation(8, 17, epoch)).index(0)] += 1
    assert sum((n - 500) ** 2 / 500 for n in places) < 24.3


def splitmix64(state: int) -> int:
    """The output function of SplitMix64 as Steele, Lea & Flood (2014) give it, on Python integers."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


MASK = (1 << 64) - 1


@pytest.mark.parametrize(("stream", "hashed"), [(0, b"5/2"), (3, b"5/2/3")])
def test_permutation_is_that_of_the_published_generator(stream: int, hashed: bytes) -> None:
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF, "the first output for seed 0"
    start = int.from_bytes(hashlib.sha256(hashed).digest()[:8], "little")
    keys = [splitmix64(start + i * 0x9E3779B97F4A7C15) for i in range(1, 101)]
    expected = sorted(range(100), key=keys.__getitem__)
    assert permutation(100, seed=5, epoch=2, stream=stream).tolist() == expected


def test_stream_zero_draws_what_runs_without_streams_drew() -> None:
    """Written down before there were streams."""
    assert permutation(12, 0, 0).tolist() == RECORDED
    assert split([f"{i:02}" for i in range(12)], 0).batch(0, 0, 3) == tuple(f"{i:02}" for i in RECORDED[:3])


def test_streams_do_not_know_of_each_other() -> None:
    """How many of 500 rows lie at the same place in two orders is Poisson(1): over 9 with p = 1.1e-7."""
    orders = [permutation(500, 7, epoch, stream) for epoch in (0, 1) for stream in range(6)]
    assert max(int((a == b).sum()) for a, b in combinations(orders, 2)) <= 9


def test_batches_of_other_streams_are_others_and_file_order_is_that_of_the_file() -> None:
    dataset = split([f"{i:02}" for i in range(12)], 0)
    assert dataset.batch(3, 0, 6, stream=1) != dataset.batch(3, 0, 6)
    assert dataset.batch(3, 1, 6, shuffle=False, stream=1) == dataset.train[6:]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_draws_every_row_once(shuffle: bool) -> None:
    dataset = split([f"{i:02}" for i in range(12)], 0)
    epochs = [
        [r for step in range(4 * e, 4 * e + 4) for r in dataset.batch(3, step, 3, shuffle)] for e in (0, 1)
    ]
    assert all(sorted(epoch) == sorted(dataset.train) for epoch in epochs)
    assert (epochs[0] != epochs[1]) == shuffle
    assert (dataset.batch(3, 0, 3, shuffle) != dataset.batch(4, 0, 3, shuffle)) == shuffle


def test_rows_of_a_batch_are_distinct_where_an_epoch_does_not_divide() -> None:
    dataset = split([str(i) for i in range(10)], 0)
    for step in range(20):
        assert len(set(dataset.batch(0, step, 4))) == 4


def test_too_few_rows_are_refused() -> None:
    dataset = split([str(i) for i in range(10)], 4)
    with pytest.raises(HflowError, match=r"HF403.*6 rows to train on \(.*, held out: 4\), a batch needs 7"):
        dataset.batch(0, 0, 7)
    with pytest.raises(HflowError, match="HF403.*holds out 4 rows, the evaluation needs 5"):
        dataset.evaluation(5)
    with pytest.raises(HflowError, match="HF403.*holding out 10 leaves none"):
        split([str(i) for i in range(10)], 10)


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    lines, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    assert read_rows(str(lines), 0, {}) == read_rows(str(table), 0, {}) == ROWS


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8-sig")
    assert read_rows(str(file), 0, {}) == ROWS


def test_procedural_rows_are_those_of_reasoning_gym() -> None:
    options = {"min_terms": 2, "max_terms": 2}
    expected = reasoning_gym.create_dataset("basic_arithmetic", seed=0, size=7, **options)
    assert read_rows("reasoning-gym/basic_arithmetic", 7, options) == list(expected)
    other = read_rows("reasoning-gym/basic_arithmetic", 7, {**options, "seed": 1})
    assert other != list(expected)


def test_a_missing_file_is_refused_with_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text("{}\n")
    with pytest.raises(HflowError) as caught:
        read_rows(str(tmp_path / "gsm8.jsonl"), 0, {})
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF403" and diagnostic.help == "did you mean `gsm8k.jsonl`?"


@pytest.mark.parametrize("bad", ['{"a": 1', "[1, 2]", '"text"', "{'a': 1}"])
def test_a_bad_line_is_pointed_at(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n' + bad + "\n")
    with pytest.raises(HflowError) as caught:
        read_rows(str(file), 0, {})
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF403" and diagnostic.span and diagnostic.span.line == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"\n", "has no rows"),
        ("rows.jsonl", b"{}\n\n\xff\xfe", "row 1 of .* is not UTF-8"),
        ("rows.parquet", b"PAR1 not", "cannot be read"),
        ("rows.csv", b"a,b\n", "has no rows"),
        ("rows.txt", b"a,b\n", "of no known kind"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HflowError, match=f"HF403.*{message}"):
        read_rows(str(tmp_path / name), 0, {})


def test_procedural_mistakes_are_refused() -> None:
    with pytest.raises(HflowError, match="HF403.*no dataset `basic_arithmetics`") as caught:
        read_rows("reasoning-gym/basic_arithmetics", 4, {})
    assert caught.value.diagnostics[0].help == "did you mean `basic_arithmetic`?"
    with pytest.raises(HflowError, match="HF403.*refuses its options.*min_term"):
        read_rows("reasoning-gym/basic_arithmetic", 4, {"min_term": 2})
    with pytest.raises(HflowError, match="HF403.*refuses its options"):
        read_rows("reasoning-gym/basic_arithmetic", 4, {"min_terms": 5, "max_terms": 2})


def test_options_for_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(HflowError, match=r"HF403.*takes no options \(seed\)"):
        read_rows(str(tmp_path / "rows.jsonl"), 0, {"seed": 1})


def test_without_reasoning_gym_the_command_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(HflowError) as caught:
        read_rows("reasoning-gym/basic_arithmetic", 4, {})
    assert caught.value.diagnostics[0].help == "in hflow's checkout: pip install -e '.[tasks]'"


def test_a_prompt_with_several_responses_is_on_one_side() -> None:
    rows = [(prompt, response) for prompt in "abcdef" for response in (1, 2, 2)]
    data = hold_out("rows", rows, lambda row: row[0], lambda row: row, 2)
    assert data.duplicates == 6  # the second 2 of each prompt
    assert len(data.held_out) == 2 and all(response == 1 for _, response in data.held_out)
    held = {prompt for prompt, _ in data.held_out}
    assert sorted(data.train) == [(p, r) for p in "abcdef" if p not in held for r in (1, 2)]
