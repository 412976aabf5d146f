from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.diagnostics import HflowError
from hflow.graph.source.document import MAX_BYTES, MAX_ITEMS, Item, parse, read, resolve

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn", "Zl", "Zp")), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def codes(text: str) -> list[str]:
    with pytest.raises(HflowError) as caught:
        parse(text, "x.yaml")
    return [d.code for d in caught.value.diagnostics]


@given(JSON)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_json_text_is_read_as_json_reads_it(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert parse(text, "x").plain() == json.loads(text)


# The examples of the YAML 1.2.2 specification's core schema (10.3.2), and what YAML 1.1 read otherwise.
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("~", None),
        ("", None),
        ("True", True),
        ("FALSE", False),
        ("0", 0),
        ("0o7", 7),
        ("0x3A", 58),
        ("-19", -19),
        ("0.", 0.0),
        ("-0.0", -0.0),
        (".5", 0.5),
        ("+12e03", 12000.0),
        ("-2E+05", -200000.0),
        ("1e-4", 1e-4),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("0777", 777),
    ],
)
def test_plain_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    found = resolve(text)
    assert (found, type(found)) == (value, type(value))


def test_not_a_number() -> None:
    found = resolve(".nan")
    assert isinstance(found, float) and math.isnan(found)


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_spans_cut_keys_and_scalars_out_of_the_text(path: Path) -> None:
    document = read(path)
    lines = document.text.splitlines()
    seen = 0

    def cut(item: Item, key: bool) -> str:
        span = item.key_span if key else item.span
        assert span
        return lines[span.line - 1][span.column - 1 : span.end_column - 1]

    def walk(item: Item) -> None:
        nonlocal seen
        children = item.value.items() if isinstance(item.value, dict) else []
        for key, child in children:
            assert cut(child, key=True) == key
            walk(child)
        for child in item.value if isinstance(item.value, tuple) else []:
            walk(child)
        if isinstance(item.value, str):
            assert cut(item, key=False).strip('"') == item.value
            seen += 1

    walk(document.root)
    assert seen >= 5


def test_a_span_is_followed_as_far_as_the_document_goes() -> None:
    document = parse("a:\n  b: {c: 1}\n", "x")
    assert (document.span(("a", "b", "c")).line, document.span(("a", "b", "c")).column) == (2, 10)
    assert document.span(("a", "b", "nothing", "below")).column == 3  # the key `b`
    assert document.span(("a", "b", "c"), key=True).column == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["HF002"]),
        ("# only a comment\n", ["HF002"]),
        ("a: [1, 2", ["HF002"]),
        ('a: "\\UFFFFFFFF"', ["HF002"]),
        ("a: \x00", ["HF002"]),
        (f"a: {'9' * 5000}", ["HF002"]),
        ("{a: 1, b: 2, a: 3}", ["HF003"]),
        ("a: {x: 1, x: 2, x: 3}", ["HF003", "HF003"]),
        ("a: &x 1\nb: *x", ["HF004", "HF004"]),
        ("a: !!python/object:os.system 1", ["HF004"]),
        ("a: ! 1", ["HF004"]),
        ("%YAML 1.1\n---\na: 1", ["HF004"]),
        ("a: 1\n---\nb: 1", ["HF004"]),
        ("{[1, 2]: 3}", ["HF004"]),
        ("[" * 40 + "]" * 40, ["HF005"]),
        ("[" * 100_000, ["HF005"]),
        ("- 1\n" * (MAX_ITEMS + 1), ["HF005"]),
        (" " * (MAX_BYTES + 1), ["HF005"]),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:12],
)
def test_refused_texts(text: str, expected: list[str]) -> None:
    assert codes(text) == expected


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin1.yaml").write_bytes(b"a: \xe9")
    (tmp_path / "large.yaml").write_bytes(b" " * (MAX_BYTES + 1))
    expected = {"missing.yaml": "HF001", ".": "HF001", "latin1.yaml": "HF001", "large.yaml": "HF005"}
    for name, code in expected.items():
        with pytest.raises(HflowError) as caught:
            read(tmp_path / name)
        assert [d.code for d in caught.value.diagnostics] == [code]


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    document = read(tmp_path / "bom.yaml")
    assert document.plain() == {"a": 1, "b": 2}
    assert document.span(("b",)).line == 2
