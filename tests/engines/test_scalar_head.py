"""Models with a scalar head against transformers' sequence classifiers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from hflow.cost.activation_memory import head_bytes
from hflow.diagnostics import HflowError
from hflow.graph.ir import Head
from hflow.plan.flops import forward_flops
from hflow.plan.layout import Mesh
from hflow.plan.read_shape import read_shape
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.hf import write_hf
from hflow.runtime.rows import Rows
from tests.engines.models import (
    ADAM,
    Folders,
    load_hf,
    make_call,
    make_engine,
    read_weights,
    score_node,
    share,
)
from tests.engines.processes import Pool
from tests.engines.test_generate import as_lists
from tests.engines.test_train import MESHES, ROWS, rollout


def judge_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    data: dict[str, Rows],
    micro_batch: int,
    strategy: Strategy = PLAIN,
) -> Any:
    engine = make_engine(rank, new_group, folder, mesh, head="scalar", frozen=True)
    call = make_call(engine, rank, score_node(ROWS, 1.0), ROWS, micro_batch, strategy=strategy)
    inputs = {name: data[name].slice(*share(mesh, rank, ROWS)) for name in ("tokens", "mask")}
    outputs = engine.run(call, inputs).outputs
    if not outputs:
        return None
    assert outputs["score"].lengths is None
    return as_lists(outputs["values"]), outputs["score"].values.tolist()


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "layout,micro_batch", [("one", 14), ("one", 3), ("dp2", 4), ("tp2", 5), ("tp2pp2", 4)]
)
def test_values_and_scores_equal_transformers(
    pool: Pool, folders: Folders, family: str, layout: str, micro_batch: int
) -> None:
    folder, mesh = folders.of(family, False, "scalar"), MESHES[layout]
    data = rollout(folders.of("llama", False))
    results = pool.run(len(mesh.devices), judge_on_rank, folder, mesh, data, micro_batch)
    replicas: dict[int, Any] = {}
    for rank, found in enumerate(results):
        at = mesh.coordinates(rank)
        assert (found is None) == (at["pp"] < mesh.pp - 1)
        if found is not None:
            assert replicas.setdefault(at["dp"], found) == found, "ranks of a replica agree"
    values = [row for i in sorted(replicas) for row in replicas[i][0]]
    scores = [score for i in sorted(replicas) for score in replicas[i][1]]
    model: Any = load_hf(folder, head="scalar")
    for row, mine, score in zip(range(ROWS), values, scores, strict=True):
        tokens = data["tokens"].slice(row, row + 1).values.long()
        with torch.no_grad():
            hidden = model.model(tokens[None]).last_hidden_state[0]
            expected = model(tokens[None]).logits.item()
        everywhere = (hidden @ model.score.weight.T).squeeze(1)
        # float32 sums of some hundred terms of order 1
        assert mine == pytest.approx(everywhere[len(tokens) - len(mine) - 1 : -1].tolist(), abs=1e-5)
        assert score == pytest.approx(expected, abs=1e-5)
    assert torch.tensor(scores).std() > 0.1


def weights_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, head: Head, frozen: bool
) -> dict[str, Any] | str:
    try:
        return read_weights(make_engine(rank, new_group, folder, mesh, head=head, frozen=frozen))
    except HflowError as error:
        return str(error)


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_critic_begins_with_a_head_of_zeros(pool: Pool, folders: Folders, tied: bool) -> None:
    folder, mesh = folders.of("qwen2", tied), MESHES["tp2pp2"]
    results = pool.run(4, weights_on_rank, folder, mesh, "scalar", False)
    expected = load_hf(folder).state_dict()
    for rank, found in enumerate(results):
        assert ("score.weight" in found) == (mesh.coordinates(rank)["pp"] == 1)
        for name, (box, values) in found.items():
            part = (
                expected[name][tuple(slice(*span) for span in box)]
                if name in expected
                else torch.zeros(1, 64)
            )
            assert torch.equal(torch.from_numpy(values), part), name
    assert set().union(*results) == (expected.keys() - {"lm_head.weight"}) | {"score.weight"}


def test_a_head_that_does_not_fit_the_files_is_refused(pool: Pool, folders: Folders, tmp_path: Path) -> None:
    one = MESHES["one"]
    (message,) = pool.run(1, weights_on_rank, folders.of("llama", False), one, "scalar", True)
    assert message.startswith("error[HF406]")
    assert "there is no tensor `score.weight`, which model `actor` needs" in message
    assert "a reward model's folder has the tensor `score.weight`; a language model's has none" in message
    scalar = folders.of("llama", False, "scalar")
    tied = tmp_path / "tied"  # without a matrix of its own, a token head would lack nothing
    shutil.copytree(scalar, tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    for folder in (scalar, str(tied)):
        (message,) = pool.run(1, weights_on_rank, folder, one, "lm", False)
        assert message.startswith("error[HF406]") and "scalar head" in message
    two = tmp_path / "two"
    shutil.copytree(scalar, two)
    tensors = load_file(two / "model.safetensors")
    save_file({**tensors, "score.weight": torch.ones(2, 64)}, two / "model.safetensors")
    (message,) = pool.run(1, weights_on_rank, str(two), one, "scalar", True)
    assert "`score.weight` has shape (2, 64), asked for is (1, 64)" in message


def test_planning_counts_a_number_per_position_and_no_vocabulary(folders: Folders) -> None:
    token = read_shape(folders.of("qwen2", True))
    scalar, untied = token.with_head("scalar"), replace(token, tied=False)
    assert forward_flops(untied, 10, 5.0) - forward_flops(scalar, 10, 5.0) == 2 * 10 * (32 - 1) * 64
    work = Workload(rows=8, prompt=5, response=7)
    for tp, vocabulary in ((1, 32), (2, 16)):
        mesh = Mesh.of(tuple(range(tp)), tp=tp)
        both = [head_bytes("score", shape, "f32", work, mesh, 2) for shape in (untied, scalar)]
        assert both[0] - both[1] == 3 * 2 * 7 * (vocabulary - 1) * 4, (
            "outputs of two rows of 7 tokens, and two copies"
        )


def export_on_rank(rank: int, new_group: NewGroup, source: str, target: str) -> None:
    weights = make_engine(rank, new_group, source, MESHES["one"], ADAM, head="scalar").weights
    weights.write("score.weight", ((0, 1), (0, 64)), torch.linspace(-1, 1, 64)[None])
    write_hf(target, source, ((name, weights.read(name, weights.box(name))) for name in weights.names()))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_trained_critic_is_a_sequence_classifier(
    pool: Pool, folders: Folders, tmp_path: Path, family: str
) -> None:
    source, target = folders.of(family, True), str(tmp_path / "critic")
    pool.run(1, export_on_rank, source, target)
    found: Any = AutoModelForSequenceClassification.from_pretrained(target)
    assert type(found).__name__.lower() == f"{family}forsequenceclassification"
    assert found.config.num_labels == 1 and found.score.weight.dtype == torch.float32
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        hidden = load_hf(source).model(tokens).last_hidden_state  # type: ignore[operator]
        expected = hidden[0, -1] @ torch.linspace(-1, 1, 64)
        assert found(tokens).logits.item() == pytest.approx(expected.item(), abs=1e-5)
    (again,) = pool.run(1, weights_on_rank, target, MESHES["one"], "scalar", True)
    assert all(
        torch.equal(torch.from_numpy(values), found.state_dict()[n]) for n, (_, values) in again.items()
    )
