from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hflow.diagnostics import HflowError
from hflow.runtime.tokenizer import Tokenizer, UnknownTextError, load_tokenizer
from hflow.runtime.tools.new_model import ALPHABET, character_tokenizer, new_model


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
    reserved = len(tokenizer.fast) - 1
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


def saved(folder: Path, name: str = "tokenizer_config.json", **values: object) -> Path:
    """A character tokenizer in `folder`, with other values in one of its files."""
    character_tokenizer("ab").save_pretrained(folder)
    file = folder / name
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**old, **values}))
    return folder


@pytest.mark.parametrize("key", ["eos_token", "pad_token", "bos_token"])
def test_a_special_token_outside_the_vocabulary_is_refused(tmp_path: Path, key: str) -> None:
    """transformers would give it the next id, which no row of the embedding was trained for."""
    saved(tmp_path, **{key: "</s>"})
    with pytest.raises(HflowError, match=f"HF406.*{key} '</s>' is not in the vocabulary of tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_token_without_a_row_is_refused(tmp_path: Path) -> None:
    assert len(load_tokenizer(saved(tmp_path), 16).fast) == 16
    with pytest.raises(
        HflowError, match=r"HF406.*token '<reserved-10>' has id 15, and the embedding 15 rows"
    ):
        load_tokenizer(tmp_path, 15)


@pytest.mark.parametrize(
    ("end", "problem"), [(16, "16 is outside the vocabulary of 16"), ([True], "no token")]
)
def test_an_end_of_generation_config_outside_the_vocabulary_is_refused(
    tmp_path: Path, end: object, problem: str
) -> None:
    assert load_tokenizer(saved(tmp_path, "generation_config.json", eos_token_id=[1, 15]), 16)
    saved(tmp_path, "generation_config.json", eos_token_id=end)
    with pytest.raises(HflowError, match=f"HF406.*generation_config.json.*{problem}"):
        load_tokenizer(tmp_path, 16)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested deeper"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"a": "\\udc00"}', "lone surrogate"),
        ("[]", "no JSON object"),
    ],
    ids=["deep", "duplicate", "surrogate", "list"],
)
def test_a_file_that_is_no_plain_json_is_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (saved(tmp_path) / name).write_text(text)
    with pytest.raises(HflowError, match=f"HF406.*{name}.*{problem}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/a.jinja"]
)
def test_a_pipe_or_device_in_the_folder_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file = saved(tmp_path) / name
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        make(file)
        with pytest.raises(HflowError, match=f"HF406.*`{file.name}` is no regular file"):
            load_tokenizer(tmp_path)
        file.unlink()


def test_a_damage_that_makes_the_library_panic_is_refused(tmp_path: Path) -> None:
    """Rust's panics are no `Exception`."""
    file = saved(tmp_path) / "tokenizer.json"
    values = json.loads(file.read_text())
    values["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    file.write_text(json.dumps(values))
    with pytest.raises(HflowError, match="HF406.*cannot be read: Precompiled"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_draws_lots_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path) / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["dropout"] = 0.1
    file.write_text(json.dumps(values))
    with pytest.raises(HflowError, match="HF406.*has dropout"):
        load_tokenizer(tmp_path)


def test_a_text_at_which_the_library_fails_is_named(tmp_path: Path) -> None:
    """A Unigram model without a token for the unknown knows no way out."""
    file = saved(tmp_path) / "tokenizer.json"
    values = json.loads(file.read_text())
    pieces = ["<pad>", "<eos>", "<unk>", *"1 +2=3"]
    values["model"] = {"type": "Unigram", "unk_id": None, "vocab": [[p, -1.0] for p in pieces]}
    values["added_tokens"] = values["added_tokens"][:2]
    file.write_text(json.dumps(values))
    fast = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<eos>", pad_token="<pad>")
    tokenizer = Tokenizer(fast, eos_id=1, pad_id=0)
    assert tokenizer.encode(["1 + 2"]) == [[3, 4, 5, 4, 6]]
    with pytest.raises(UnknownTextError, match="the tokenizer fails on '1 - 2'") as caught:
        tokenizer.encode(["1 + 2", "1 - 2"])
    assert caught.value.index == 1
