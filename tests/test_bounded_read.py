"""Files and JSON read within limits: what is refused, and that nothing hangs or fills the memory."""

from __future__ import annotations

import json
import os
import socket
import threading
import tracemalloc
from pathlib import Path

import pytest

from hflow.bounded_read import MAX_JSON_DEPTH, UnreadableError, parse_json, read_bytes, read_json, read_text


def test_a_file_of_the_greatest_size_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    assert read_bytes(tmp_path / "a", 10) == b"x" * 10
    with pytest.raises(UnreadableError, match="larger than 9 bytes") as caught:
        read_bytes(tmp_path / "a", 9)
    assert caught.value.reason == "large"


def test_a_file_whose_size_is_not_known_is_read_up_to_the_limit() -> None:
    assert Path("/proc/self/maps").stat().st_size == 0
    with pytest.raises(UnreadableError, match="larger than 99 bytes"):
        read_bytes("/proc/self/maps", 99)
    assert read_text("/proc/self/comm", 99).strip()


def test_a_sparse_file_takes_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    tracemalloc.start()
    with pytest.raises(UnreadableError, match="larger"):
        read_bytes(tmp_path / "sparse", 2**30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(("path", "what"), [("/dev/zero", "a device"), ("/", "a folder")])
def test_what_is_no_regular_file_is_refused(path: str, what: str) -> None:
    with pytest.raises(UnreadableError, match=f"it is {what}, no regular file") as caught:
        read_bytes(path, 10)
    assert caught.value.reason == "kind"


def test_a_pipe_without_a_writer_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reasons: list[str] = []

    def read() -> None:
        with pytest.raises(UnreadableError) as caught:
            read_bytes(tmp_path / "pipe", 10)
        reasons.append(caught.value.reason)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert reasons == ["kind"]


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path may have a hundred characters or so
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(UnreadableError):
            read_bytes("socket", 10)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("missing", "missing"), ("a\0b", "os"), ("x" * 5000, "os"), ("\ud800", "os")],
    ids=["missing", "null", "long", "surrogate"],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, reason: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        read_bytes(path, 10)
    assert caught.value.reason == reason and str(caught.value)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (tmp_path, "/dev/zero"):
        with pytest.raises(UnreadableError):
            read_bytes(path, 10)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_text_must_be_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfa")
    assert read_text(tmp_path / "a", 10, "utf-8-sig") == "a"
    (tmp_path / "a").write_bytes(b"a\xff")
    with pytest.raises(UnreadableError, match="not UTF-8: .* at byte 1") as caught:
        read_text(tmp_path / "a", 10)
    assert caught.value.reason == "text"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', "duplicate key 'c'"),
        ('{"a": ["\\ud800"]}', r"'\\ud800' has a lone surrogate"),
        ('{"\\udfff": 1}', "lone surrogate"),
        ("[" * 100_000, "nested deeper"),
        ('{"a":' * 100_000, "nested deeper"),
        ("[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1), "nested deeper"),
        ("9" * 10_000, "bad JSON"),
    ],
    ids=[
        "empty",
        "twice",
        "surrogate",
        "surrogate in key",
        "brackets",
        "braces",
        "a level too many",
        "digits",
    ],
)
def test_json_that_is_refused(text: str, said: str) -> None:
    with pytest.raises(UnreadableError, match=said) as caught:
        parse_json(text)
    assert caught.value.reason == "json"
    str(caught.value).encode()


@pytest.mark.parametrize("value", [None, 1, "é", "\U0001f600", {"a": [1.5, {"b": True}], "c": "\\ud800"}, []])
def test_other_json_is_read_as_python_does(value: object, tmp_path: Path) -> None:
    assert parse_json(json.dumps(value)) == value
    (tmp_path / "a.json").write_text(json.dumps(value, ensure_ascii=False))
    assert read_json(tmp_path / "a.json", 1000) == value


def test_the_deepest_json() -> None:
    parse_json("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH)
    parse_json("[" * (MAX_JSON_DEPTH - 1) + "1" + "]" * (MAX_JSON_DEPTH - 1))


def test_numbers_that_are_none() -> None:
    assert parse_json("[Infinity]") == [float("inf")]
    with pytest.raises(UnreadableError, match="NaN is no JSON number"):
        parse_json("[NaN]", allow_nan=False)


def test_the_line_of_bad_json() -> None:
    with pytest.raises(UnreadableError) as caught:
        parse_json('{\n"a": 1,\n}')
    assert caught.value.line == 3
