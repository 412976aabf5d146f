"""A damaged model folder is refused with diagnostics, or every value that is read of it makes sense.

Whether it does is worked out here again, from the files alone, without hflow's readers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hflow.diagnostics import HflowError
from hflow.graph.ir import Head, Model
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import parameters
from hflow.plan.read_shape import read_shape
from hflow.plan.vocabulary import beyond, token_ids
from hflow.runtime.tokenizer import Tokenizer, UnknownTextError, load_tokenizer
from hflow.runtime.tools.new_model import new_model
from hflow.runtime.weight_files import StoredTensor, opened, stored_tensors
from tests.data.folder_mutants import copied, damage, in_two_files
from tests.limits import memory_limited_to

MUTANTS, CHUNKS = 300, 6
FLOATS = {"torch.float64", "torch.float32", "torch.float16", "torch.bfloat16"}
CODES = {"HF303", "HF406"}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin") / "model"
    new_model(folder, family="llama", layers=2, hidden=16, heads=2, ffn=16, alphabet="0123456789+-= ")
    in_two_files(folder)
    return folder


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    with memory_limited_to(2 * 2**30):
        yield


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_damaged_folder_is_refused_or_makes_sense(origin: Path, tmp_path: Path, chunk: int) -> None:
    accepted = 0
    for seed in range(chunk * MUTANTS // CHUNKS, (chunk + 1) * MUTANTS // CHUNKS):
        folder = copied(origin, tmp_path / f"mutant-{seed}")
        damage(folder, seed)
        head: Head = "scalar" if seed % 3 == 0 else "lm"
        try:
            shape, tokenizer, tensors = loaded(folder, head)
        except HflowError as error:
            assert {d.code for d in error.diagnostics} <= CODES and str(error), seed
            continue
        assert_sensible(folder, shape, tokenizer, tensors, head)
        accepted += 1
    assert 0 < accepted < MUTANTS // CHUNKS // 2  # most are damaged indeed, and some are not


def test_the_folder_itself_makes_sense(origin: Path) -> None:
    for head in ("lm", "scalar"):
        assert_sensible(origin, *loaded(origin, head), head)


def loaded(folder: Path, head: Head) -> tuple[ModelShape, Tokenizer, dict[str, StoredTensor]]:
    """As a plan is made and a worker loads it; all weights are read."""
    shape = read_shape(str(folder), head=head)
    assert not beyond(token_ids(str(folder)) or {}, shape.vocab) or refused_when_loaded(folder, shape)
    tokenizer = load_tokenizer(folder, shape.vocab)
    tensors = stored_tensors(Model("actor", str(folder), head, dtype="f32"), shape)
    for name, found in tensors.items():
        with opened(found.file) as file:
            assert tuple(file.get_tensor(name).shape) == found.shape
    return shape, tokenizer, tensors


def refused_when_loaded(folder: Path, shape: ModelShape) -> bool:
    with pytest.raises(HflowError):
        load_tokenizer(folder, shape.vocab)
    return True


def assert_sensible(
    folder: Path, shape: ModelShape, tokenizer: Tokenizer, tensors: dict[str, StoredTensor], head: Head
) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert type(config["num_hidden_layers"]) is int and config["num_hidden_layers"] == shape.num_layers
    assert config.get("tie_word_embeddings") in (True, False, None)
    files = {
        name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    read = {p.name: p.shape for p in parameters(shape)}
    assert read.keys() - files.keys() <= ({"score.weight"} if head == "scalar" else set())
    assert files.keys() == tensors.keys() and not any("layers.9" in name or name == "x" for name in files)
    for name in read.keys() & files.keys():
        assert tuple(files[name].shape) == read[name] and str(files[name].dtype) in FLOATS
    assert_tokens_fit(tokenizer, shape)


def assert_tokens_fit(tokenizer: Tokenizer, shape: ModelShape) -> None:
    assert 0 <= tokenizer.eos_id < shape.vocab and 0 <= tokenizer.pad_id < shape.vocab
    try:
        (ids,) = tokenizer.encode(["1+2 = 3"])
    except UnknownTextError:
        return
    assert all(0 <= i < shape.vocab for i in ids)
    assert ids == tokenizer.encode(["1+2 = 3"])[0]
