from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hflow.diagnostics import HflowError
from hflow.runtime.new_model import ALPHABET, character_tokenizer, new_model
from hflow.runtime.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    new_model(folder, family="qwen2", layers=1, hidden=16, heads=2)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.text(ALPHABET, max_size=40), max_size=4))
def test_text_survives_a_round_trip(texts: list[str]) -> None:
    fast = character_tokenizer(ALPHABET)
    tokenizer = Tokenizer(fast, eos_id=1, pad_id=0)
    rows = tokenizer.encode(texts)
    assert [len(row) for row in rows] == [len(text) for text in texts], "one token per character"
    assert tokenizer.decode(rows) == texts


def test_spaces_survive_where_auto_tokenizer_swallows_them(folder: Path, tokenizer: Tokenizer) -> None:
    text = "1 +  2 = 3"
    auto = AutoTokenizer.from_pretrained(folder)
    assert auto.decode(auto.encode(text)) != text, "the trap is gone: AutoTokenizer would do"
    assert tokenizer.decode(tokenizer.encode([text])) == [text]


def test_ends_and_padding_carry_no_text_but_reserved_tokens_show(tokenizer: Tokenizer) -> None:
    (row,) = tokenizer.encode(["42"])
    reserved = tokenizer.vocab_size - 1
    decoded = tokenizer.decode([[*row, tokenizer.eos_id, tokenizer.pad_id], [*row, reserved]])
    assert decoded[0] == "42" and decoded[1].startswith("42<reserved")


def test_a_character_outside_the_alphabet_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"no token for 'é' in 'caf.'"):
        tokenizer.encode(["ok", "café"])


def test_a_folder_that_does_not_exist_is_named_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    helps: dict[str, str] = {}
    for name in ("models/tiny", "Qwen/Qwen2-0.5B", "./elsewhere"):
        with pytest.raises(HflowError) as caught:
            load_tokenizer(name)
        (diagnostic,) = caught.value.diagnostics
        assert diagnostic.code == "HF406"
        assert f"`{name}`: there is no such folder in `{tmp_path}`" in diagnostic.message
        helps[name] = diagnostic.help
    assert helps == {"models/tiny": "", "Qwen/Qwen2-0.5B": "hub names are not downloaded", "./elsewhere": ""}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HflowError, match=r"HF406.*no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HflowError, match="HF406.*cannot be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    character_tokenizer("ab").save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    values = json.loads(config.read_text())
    del values["eos_token"]
    config.write_text(json.dumps(values))
    with pytest.raises(HflowError, match="HF406.*eos_token"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    character_tokenizer("123+= ").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    values["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": ""}
    file.write_text(json.dumps(values))
    with pytest.raises(HflowError, match="HF406.*turns '1 \\+ 2 = 3' into '1\\+2=3'"):
        load_tokenizer(tmp_path)
