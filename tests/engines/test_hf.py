"""Model folders that hflow writes, read by transformers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hflow.diagnostics import HflowError
from hflow.plan.layout import Mesh
from hflow.plan.origin import GRAPH_FILE, PLAN_FILE
from hflow.runtime import hf
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import new_model
from tests.engines.models import VARIANTS, Folders, load_hf, make_engine
from tests.engines.processes import Pool


def write_on_rank(rank: int, new_group: NewGroup, source: str, target: str, shard_bytes: int) -> None:
    """Write the engine's weights, halved."""
    weights = make_engine(rank, new_group, source, Mesh.of((0,))).weights
    tensors = ((name, weights.read(name, weights.box(name)) / 2) for name in weights.names())
    with patch.object(hf, "SHARD_BYTES", shard_bytes):
        hf.write_hf(target, source, tensors)


@pytest.mark.parametrize("shard_bytes", [4 * 2**30, 40_000])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_is_written(
    pool: Pool, folders: Folders, tmp_path: Path, tied: bool, shard_bytes: int
) -> None:
    source, target = folders.of("qwen2", tied), tmp_path / "trained"
    pool.run(1, write_on_rank, source, str(target), shard_bytes)
    pool.run(1, write_on_rank, str(source), str(target), shard_bytes)  # replaces the folder
    found = AutoModelForCausalLM.from_pretrained(target)
    expected = load_hf(source)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.div_(2)
        tokens = torch.arange(3, 19)[None]
        torch.testing.assert_close(found(tokens).logits, expected(tokens).logits, atol=1e-5, rtol=0)
    assert found.dtype == torch.float32
    assert load_tokenizer(target).encode(["1+2=3"]) == load_tokenizer(source).encode(["1+2=3"])
    files = sorted(target.glob("*.safetensors"))
    assert len(files) == 1 if shard_bytes > 2**30 else len(files) > 3
    assert all(file.stat().st_size < shard_bytes + 10_000 for file in files)
    assert [p.name for p in tmp_path.iterdir()] == ["trained"], "no temporary folders are left"


def test_hflow_loads_a_sharded_folder(pool: Pool, folders: Folders, tmp_path: Path) -> None:
    source = folders.of("llama", False)
    once, twice = tmp_path / "once", tmp_path / "twice"
    pool.run(1, write_on_rank, source, str(once), 40_000)
    pool.run(1, write_on_rank, str(once), str(twice), 40_000)
    for (name, a), b in zip(load_hf(source).state_dict().items(), load_hf(str(twice)).state_dict().values()):
        assert torch.equal(a / 4, b), name


@pytest.mark.matrix
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_trip_is_the_same_model(
    pool: Pool, folders: Folders, tmp_path: Path, variant: str, tied: bool
) -> None:
    """In names, shapes, dtypes and values of tensors, and in logits."""
    source, once, twice = folders.of(variant, tied), tmp_path / "once", tmp_path / "twice"
    pool.run(1, write_on_rank, source, str(once), 4 * 2**30)
    pool.run(1, write_on_rank, str(once), str(twice), 4 * 2**30)
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (source, twice))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor / 4, after[name]), name
    expected, found = load_hf(source), load_hf(str(twice))
    assert type(found) is type(expected)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.div_(4)
        tokens = torch.arange(3, 23)[None]
        torch.testing.assert_close(found(tokens).logits, expected(tokens).logits, atol=1e-5, rtol=0)


def test_bf16_weights_say_so_in_config(folders: Folders, tmp_path: Path) -> None:
    source = folders.of("llama", False)
    state = {name: tensor.bfloat16() for name, tensor in load_hf(source).state_dict().items()}
    hf.write_hf(tmp_path / "half", source, state.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_what_a_source_was_made_from_is_not_said_of_its_copy(folders: Folders, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders.of("llama", False), source)
    (source / GRAPH_FILE).write_text("of the source")
    (source / PLAN_FILE).write_text("of the source")
    tensors = load_hf(str(source)).state_dict()
    hf.write_hf(tmp_path / "without", source, tensors.items())
    assert not {GRAPH_FILE, PLAN_FILE} & {file.name for file in (tmp_path / "without").iterdir()}
    hf.write_hf(tmp_path / "with", source, tensors.items(), more={GRAPH_FILE: "of the copy"})
    assert (tmp_path / "with" / GRAPH_FILE).read_text() == "of the copy"
    assert not (tmp_path / "with" / PLAN_FILE).exists()


def test_a_failure_leaves_the_old_folder(folders: Folders, tmp_path: Path) -> None:
    source = folders.of("llama", False)
    target = tmp_path / "model"
    shutil.copytree(source, target)
    before = sorted((p.name, p.stat().st_size) for p in target.iterdir())

    def broken() -> Any:
        yield "model.norm.weight", torch.zeros(64)
        raise OSError("disk full")

    with pytest.raises(HflowError, match=r"HF406.*disk full"):
        hf.write_hf(target, source, broken())
    assert sorted((p.name, p.stat().st_size) for p in target.iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_weights_may_be_read_by_whom_other_files_may(tmp_path: Path, umask: int, mode: int) -> None:
    """safetensors writes files for their owner only; those of a source are no pattern for new ones."""
    source, target = tmp_path / "source", tmp_path / "new/target"
    before = os.umask(umask)
    try:
        new_model(source, layers=1, hidden=32, heads=4)
        made = {file.name: file.stat().st_mode & 0o777 for file in source.iterdir()}
        (source / "config.json").chmod(0o444)
        hf.write_hf(target, source, load_file(source / "model.safetensors").items())
    finally:
        os.umask(before)
    written = {file.name: file.stat().st_mode & 0o777 for file in target.iterdir()}
    assert written == made == dict.fromkeys(made, mode)
    assert "model.safetensors" in made


@pytest.mark.parametrize(("padding", "written"), [(0, 0), (1, None), (-1, -1), (-15, None), (None, None)])
def test_a_classifier_never_pads_with_its_end_token(
    tmp_path: Path, padding: int | None, written: int | None
) -> None:
    """transformers would take the end token, 1 of 16, for padding, and read the score one token early."""
    source, target = tmp_path / "source", tmp_path / "target"
    new_model(source, layers=1, hidden=32, heads=4, alphabet="abcdefghi", head="scalar")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "pad_token_id": padding}))
    hf.write_hf(target, source, load_file(source / "model.safetensors").items())
    assert json.loads((target / "config.json").read_text())["pad_token_id"] == written
    if padding == 1:
        found, tokens = AutoModelForSequenceClassification.from_pretrained(target), torch.tensor([[5, 6, 1]])
        with torch.no_grad():
            hidden = found.model(tokens).last_hidden_state[0]  # type: ignore[operator]
            assert torch.equal(found(tokens).logits[0], hidden[-1] @ found.score.weight.T)
