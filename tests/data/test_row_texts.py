"""Texts are tokenised some at a time: rows and messages are those of all at once."""

from __future__ import annotations

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.row_sources import RowSource
from hflow.runtime.engines.python import row_texts
from hflow.runtime.source_rows import SourceRows
from tests.data.python_engine import TOKENIZER


def texts(count: int) -> row_texts.RowTexts:
    rows = [{"a": str(n)} for n in range(count)]
    found = SourceRows((RowSource("s", ("s.jsonl",)),), rows, [0] * count, ("a",), (0,), ("s.jsonl",))
    return row_texts.RowTexts("s", found, range(count))


@pytest.mark.parametrize("chunk", [1, 3, 7, 8])
def test_tokens_are_those_of_all_texts_at_once(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(row_texts, "CHUNK", chunk)
    written = [f"{n} + {n * n}" for n in range(7)]
    assert texts(7).encode("prompt", TOKENIZER, written) == TOKENIZER.encode(written)
    assert texts(0).encode("prompt", TOKENIZER, []) == []
    with pytest.raises(HflowError, match="row 5 of `s.jsonl`, prompt: the tokenizer has no token for"):
        texts(7).encode("prompt", TOKENIZER, [*written[:5], "☃", written[6]])
