"""Adapters that PEFT has written, in this engine, against PEFT's own models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model

from hflow.graph.adapter import ADAPTER_TARGETS, AdapterTarget, StoredAdapter
from hflow.graph.ir import Head, Model
from hflow.plan.layout import Mesh
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.plan.stored_adapter import resolved_adapter
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.rows import Rows
from hflow.runtime.tokenizer import load_tokenizer
from tests.engines.models import (
    ADAM,
    CLASSES,
    Folders,
    generate_node,
    load_hf,
    make_call,
    make_engine,
    prompt_rows,
    score_node,
    share,
    some_prompts,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_adapter import near, plain
from tests.engines.test_train import MESHES, PPO, ROWS, Reference, response_log_probs, rollout

SOME: tuple[AdapterTarget, ...] = ("q_proj", "v_proj", "o_proj", "down_proj")
TASKS = {"lm": TaskType.CAUSAL_LM, "scalar": TaskType.SEQ_CLS}
OPTIONS: dict[str, Any] = ADAM | PPO | {"aggregate": "sequence_mean"}


def write_adapter(folder: Path, base: str, head: Head, seed: int = 3, **options: Any) -> Any:
    """A folder as PEFT writes it, of an adapter (and head) of random numbers, and PEFT's model in f64."""
    config = LoraConfig(**({"r": 4, "lora_alpha": 6, "task_type": TASKS[head]} | options))
    model = get_peft_model(_loaded(base, torch.float32, head), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(str(folder))
    read: Any = PeftModel.from_pretrained(_loaded(base, torch.float64, head), str(folder))
    return read.double().eval()


def _loaded(folder: str, dtype: torch.dtype, head: Head) -> Any:
    labels = {} if head == "lm" else {"num_labels": 1}
    return CLASSES[head].from_pretrained(folder, dtype=dtype, **labels).eval()


def stored_engine(
    rank: int, new_group: NewGroup, base: str, mesh: Mesh, adapter: str, head: Head = "lm",
    options: dict[str, Any] | None = None, on: MegatronModel | None = None,
) -> MegatronModel:  # fmt: skip
    model = Model("actor", base, head, options is None, "f32", adapter=StoredAdapter(adapter))
    shape = replace(read_shape(base).with_head(head), adapter=resolved_adapter(model))
    more = load_tokenizer(base), torch.device("cpu"), options
    return MegatronModel(
        model, shape, Sharding(mesh), rank, new_group, *more, base=on.weights if on else None
    )


def judge_on_rank(rank: int, new_group: NewGroup, base: str, mesh: Mesh, adapter: str, shares: bool) -> Any:
    """Scores of rows; with `shares` beside a model that is trained on the same base."""
    trained = make_engine(rank, new_group, base, mesh, OPTIONS, adapter=_new()) if shares else None
    engine = stored_engine(rank, new_group, base, mesh, adapter, "scalar", on=trained)
    data = rollout(base)
    inputs = {name: data[name].slice(*share(mesh, rank, ROWS)) for name in ("tokens", "mask")}
    outputs = engine.run(make_call(engine, rank, score_node(ROWS, 1.0), ROWS, 3), inputs).outputs
    return outputs["score"].values.numpy() if outputs else None


def _new() -> Any:
    from hflow.graph.adapter import Adapter

    return Adapter(3, 4.0, ADAPTER_TARGETS)


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "on a base"])
@pytest.mark.parametrize("layout", ["one", "dp2", "tp2", "pp2"])
def test_scores_are_pefts(pool: Pool, folders: Folders, tmp_path: Path, layout: str, shares: bool) -> None:
    """The head is the one that PEFT has saved; the base, a language model, has none."""
    base, mesh = folders.of("llama", False), MESHES[layout]
    model, tokens = (
        write_adapter(tmp_path, base, "scalar", target_modules=list(SOME)),
        rollout(base)["tokens"],
    )
    results = pool.run(len(mesh.devices), judge_on_rank, base, mesh, str(tmp_path), shares)
    found = [r for r in results if r is not None]
    found = found if mesh.dp > 1 else found[-1:]
    with torch.no_grad():
        hidden = [model.base_model.model.model(torch.tensor([row]))[0][0] for row in tokens.lists()]
        expected = torch.stack([model.base_model.model.score(h)[-1, 0] for h in hidden])
    near(torch.cat([torch.from_numpy(part) for part in found]).numpy(), expected, 1e-5)
    assert expected.std() > 0.05


def log_probs_on_rank(rank: int, new_group: NewGroup, base: str, mesh: Mesh, adapter: str) -> Any:
    engine, data = stored_engine(rank, new_group, base, mesh, adapter), rollout(base)
    inputs = {name: data[name].slice(*share(mesh, rank, ROWS)) for name in ("tokens", "mask")}
    outputs = engine.run(make_call(engine, rank, score_node(ROWS, 0.8), ROWS, 3), inputs).outputs
    sampled: list[Any] = []
    if mesh.pp == 1:
        rows = prompt_rows(some_prompts(6)[slice(*share(mesh, rank, 6))])
        call = make_call(engine, rank, generate_node(6, 1, 5, 0.0), 6, 4)
        sampled = engine.run(call, {"prompt": rows}).outputs["tokens"].lists()
    return (outputs["logprobs"].values.numpy() if outputs else None), sampled


# What PEFT writes for them: names of kinds, of all modules, and rank-stabilised scaling.
OPTIONS_OF_PEFT: dict[str, dict[str, Any]] = {
    "some": {"target_modules": list(SOME)},
    "all-linear": {"target_modules": "all-linear", "r": 3},
    "rslora": {"target_modules": list(SOME), "use_rslora": True},
}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("one", "some"),
        ("dp2", "some"),
        ("tp2", "some"),
        ("pp2", "some"),
        ("tp2", "all-linear"),
        ("one", "rslora"),
    ],
)
def test_log_probs_and_samples_are_pefts(
    pool: Pool, folders: Folders, tmp_path: Path, layout: str, options: str
) -> None:
    base, mesh, data = folders.of("qwen3", True), MESHES[layout], None
    model = write_adapter(tmp_path, base, "lm", **OPTIONS_OF_PEFT[options])
    results = pool.run(len(mesh.devices), log_probs_on_rank, base, mesh, str(tmp_path))
    parts = [own for own, _ in results if own is not None]
    mine = torch.cat([torch.from_numpy(part) for part in (parts if mesh.dp > 1 else parts[-1:])])
    data = rollout(base)
    lengths = data["mask"].lengths
    assert lengths is not None
    rows = [*zip(data["tokens"].lists(), lengths.tolist())]
    theirs = [response_log_probs(model, torch.tensor(row), n, 0.8)[0] for row, n in rows]
    near(mine.numpy(), torch.cat(theirs).detach(), 1e-5)
    without = load_hf(base, torch.float64)
    bare = [response_log_probs(without, torch.tensor(row), n, 0.8)[0] for row, n in rows]
    assert (torch.cat(theirs) - torch.cat(bare)).abs().max() > 0.1, "the adapter hardly changes anything"
    for text in results[0][1]:
        tokens = torch.tensor(text)
        logits = model(tokens[None]).logits[0].detach()
        assert torch.equal(logits.argmax(-1)[-6:-1][-5:], tokens[-5:])


def train_on_rank(
    rank: int, new_group: NewGroup, base: str, mesh: Mesh, adapter: str, data: dict[str, Rows]
) -> Any:
    engine = stored_engine(rank, new_group, base, mesh, adapter, options=OPTIONS)
    call = make_call(engine, rank, train_node(ROWS, ROWS, OPTIONS), ROWS, 2)
    engine.run(call, {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()})
    weights = engine.weights
    return {n: (weights.box(n), weights.read(n, weights.box(n)).numpy().copy()) for n in weights.names()}


class StoredReference(Reference):
    """PPO by the book on the model that PEFT has read."""

    def __init__(self, folder: str, model: PeftModel):
        super().__init__(folder, OPTIONS)
        self.model: Any = model
        trained = [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
        trained = [p for p in trained if p.requires_grad]
        how = OPTIONS["lr"], OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"]
        self.adam = torch.optim.AdamW(trained, *how)


@pytest.mark.parametrize("layout", ["one", "dp2", "tp2", "pp2"])
def test_training_goes_on_with_it_as_in_peft(
    pool: Pool, folders: Folders, tmp_path: Path, layout: str
) -> None:
    """One update, with Adam's state from its beginning."""
    base, mesh = folders.of("qwen2", False), MESHES[layout]
    model, data = write_adapter(tmp_path, base, "lm", target_modules=list(SOME)), rollout(base)
    before = {plain(n): p.detach().clone() for n, p in model.named_parameters()}
    reference = StoredReference(base, model)
    reference.gradients(data, list(range(ROWS)))
    reference.update(OPTIONS["lr"])
    expected = {plain(n): p.detach() for n, p in model.named_parameters()}
    for found in pool.run(len(mesh.devices), train_on_rank, base, mesh, str(tmp_path), data):
        for name, (box, values) in found.items():
            near(values, expected[name][tuple(slice(*span) for span in box)], 1e-6)
    moved = {n for n, values in expected.items() if not torch.equal(values, before[n])}
    assert moved == {n for n in expected if ".lora_" in n}
