"""Adapters against PEFT on the transformers model: outputs, gradients, updates, and what is exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from hflow.graph.adapter import ADAPTER_TARGETS, Adapter
from hflow.graph.ir import Model, ModelUse
from hflow.plan.frozen import moved_parameters
from hflow.plan.layout import Mesh
from hflow.plan.parameters import parameters
from hflow.plan.read_shape import read_shape
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.adapter_export import AdapterExport
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.hf import write_hf
from hflow.runtime.rows import Rows
from tests.engines.models import (
    ADAM,
    Folders,
    generate_node,
    load_hf,
    make_call,
    make_engine,
    prompt_rows,
    read_weights,
    score_node,
    share,
    some_prompts,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, PPO, ROWS, Reference, response_log_probs, rollout

ALL = Adapter(4, 6.0, ADAPTER_TARGETS)
SOME = Adapter(3, 4.0, ("q_proj", "v_proj", "down_proj"))
Matrices = dict[str, torch.Tensor]
OPTIONS: dict[str, Any] = ADAM | PPO | {"aggregate": "sequence_mean"}


def matrices(folder: str, adapter: Adapter) -> Matrices:
    """A and B of all adapted matrices, none of them zero."""
    generator = torch.Generator().manual_seed(3)
    shape = replace(read_shape(folder), adapter=adapter)
    return {p.name: torch.randn(p.shape, generator=generator) * 0.07 for p in moved_parameters(shape)}


def peft_model(folder: str, adapter: Adapter, values: Matrices, dtype: torch.dtype) -> PeftModel:
    config = LoraConfig(r=adapter.rank, lora_alpha=int(adapter.alpha), target_modules=list(adapter.targets))
    model = get_peft_model(load_hf(folder, dtype), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(values[plain(name)])
    return model.eval()


def plain(name: str) -> str:
    """A name of PEFT's as hflow calls the parameter."""
    return name.removeprefix("base_model.model.").replace(".default.", ".").replace(".base_layer.", ".")


class PeftReference(Reference):
    """PPO by the book on PEFT's model, of which only A and B are trained."""

    def __init__(self, folder: str, adapter: Adapter, values: Matrices):
        super().__init__(folder, OPTIONS)
        self.model = peft_model(folder, adapter, values, torch.float64)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(
            trained, OPTIONS["lr"], OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"]
        )


def engine_on(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    adapter: Adapter,
    values: Matrices,
    trains: bool = False,
    strategy: Strategy = PLAIN,
) -> MegatronModel:
    options = OPTIONS if trains else None
    engine = make_engine(rank, new_group, folder, mesh, options, strategy=strategy, adapter=adapter)
    for name in (name for name in engine.weights.names() if name in values):
        box = engine.weights.box(name)
        engine.weights.write(name, box, values[name][tuple(slice(a, b) for a, b in box)])
    return engine


def train_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, adapter: Adapter, values: Matrices,
    data: dict[str, Rows], strategy: Strategy,
) -> Any:  # fmt: skip
    """Of every parameter of this rank (box, gradient or None, weight)."""
    engine = engine_on(rank, new_group, folder, mesh, adapter, values, True, strategy)
    call = make_call(engine, rank, train_node(ROWS, ROWS, OPTIONS), ROWS, 2, strategy=strategy)
    engine.run(call, {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()})
    found = read_weights(engine)
    for parameter in (p for p in engine.model.parameters() if p.requires_grad):
        parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    gradients, trained = read_weights(engine), set(values)
    return {
        name: (box, gradients[name][1] if name in trained else None, weight)
        for name, (box, weight) in found.items()
    }


@pytest.mark.matrix(24)
@pytest.mark.parametrize("layout", ["one", "dp2", "tp2", "pp2", "pp2dp2", "tp2dp2", "tp2pp2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapter", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_gradients_and_the_update_equal_pefts(
    pool: Pool, folders: Folders, layout: str, tied: bool, adapter: Adapter, variant: str
) -> None:
    folder, mesh = folders.of(variant, tied), MESHES[layout]
    values, data = matrices(folder, adapter), rollout(folder)
    model = PeftReference(folder, adapter, values)
    model.gradients(data, list(range(ROWS)))
    model.update(OPTIONS["lr"])
    named: dict[str, Any] = {plain(n): (p.grad, p.detach()) for n, p in model.model.named_parameters()}
    arguments = folder, mesh, adapter, values, data, PLAIN
    for found in pool.run(len(mesh.devices), train_on_rank, *arguments):
        for name, (box, gradient, weight) in found.items():
            where = tuple(slice(a, b) for a, b in box)
            if gradient is not None:  # of size up to about 1; rounding of float32 is about 1e-7
                near(gradient, named[name][0][where], 1e-6)
            near(weight, named[name][1][where], 1e-6 if gradient is not None else 0.0)
    assert {name for name, (gradient, _) in named.items() if gradient is not None} == set(values)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (MESHES["dp2"], Strategy(zero=1)),
        (MESHES["tp2"], Strategy(sp=True, recompute="full")),
        (Mesh.of((0, 1), cp=2), PLAIN),
    ],
    ids=["zero1", "tp2 sp recompute", "cp2"],
)
def test_other_strategies_make_the_same_update(
    pool: Pool, folders: Folders, mesh: Mesh, strategy: Strategy
) -> None:
    folder = folders.of("llama", True)
    values, data = matrices(folder, SOME), rollout(folder)
    (whole,) = pool.run(1, train_on_rank, folder, MESHES["one"], SOME, values, data, PLAIN)
    for found in pool.run(2, train_on_rank, folder, mesh, SOME, values, data, strategy):
        for name, (box, _, weight) in found.items():
            where = tuple(slice(a, b) for a, b in box)
            near(weight, torch.from_numpy(whole[name][2])[where], 1e-6)


def near(mine: Any, theirs: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(torch.from_numpy(mine).double(), theirs.double(), atol=atol, rtol=1e-5)


def use_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, adapter: Adapter, values: Matrices
) -> Any:
    """Greedy samples; log-probs of given texts, with the adapter and without."""
    engine, data = engine_on(rank, new_group, folder, mesh, adapter, values), rollout(folder)
    sampled: Any = None
    if mesh.pp == 1:
        prompts = some_prompts(6)
        call = make_call(engine, rank, generate_node(6, 1, 5, 0.0), 6, 4)
        start, stop = share(mesh, rank, 6)
        found = engine.run(call, {"prompt": prompt_rows(prompts[start:stop])}).outputs
        sampled = start, found["tokens"].lists(), found["logprobs"].lists()
    scores: list[Any] = []
    for base in (False, True):
        node = replace(score_node(ROWS, 0.8), model=ModelUse("actor", base=base))
        inputs = {name: data[name].slice(*share(mesh, rank, ROWS)) for name in ("tokens", "mask")}
        outputs = engine.run(make_call(engine, rank, node, ROWS, 3), inputs).outputs
        scores.append(outputs["logprobs"].values.numpy() if outputs else None)
    return sampled, scores


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
@pytest.mark.parametrize("adapter", [ALL, SOME], ids=["all", "some"])
def test_log_probs_and_samples_equal_pefts_and_without_the_adapter_the_bases(
    pool: Pool, folders: Folders, layout: str, adapter: Adapter
) -> None:
    folder, mesh = folders.of("qwen3", False), MESHES[layout]
    values, data = matrices(folder, adapter), rollout(folder)
    models: list[Any] = [peft_model(folder, adapter, values, torch.float64), load_hf(folder, torch.float64)]
    results = pool.run(len(mesh.devices), use_on_rank, folder, mesh, adapter, values)
    for model, mine in zip(models, results[-1][1]):
        lengths = data["mask"].lengths
        assert lengths is not None
        rows = zip(data["tokens"].lists(), lengths.tolist())
        theirs = [response_log_probs(model, torch.tensor(row), n, 0.8)[0] for row, n in rows]
        near(mine, torch.cat(theirs).detach(), 1e-5)
    apart = (results[-1][1][0] - results[-1][1][1]).__abs__().max()
    assert apart > 0.1, "the adapter hardly changes anything"
    if mesh.pp == 1:
        _, texts, log_probs = results[0][0]
        _check_greedy(models[0], texts, log_probs)


def _check_greedy(model: PeftModel, texts: list[list[int]], log_probs: list[list[float]]) -> None:
    for text, own in zip(texts, log_probs):
        tokens = torch.tensor(text)
        logits = model(tokens[None]).logits[0].detach()
        assert torch.equal(logits.argmax(-1)[-len(own) - 1 : -1], tokens[-len(own) :])


def test_an_export_is_a_merged_model_and_an_adapter_that_peft_reads(folders: Folders, tmp_path: Path) -> None:
    folder, adapter = folders.of("qwen2", True), SOME
    values = matrices(folder, adapter)
    shape = replace(read_shape(folder), adapter=adapter)
    own: dict[str, Any] = {n: p.detach() for n, p in load_hf(folder).named_parameters()}
    tensors = ((p.name, (values | own)[p.name]) for p in parameters(shape))
    export = AdapterExport(Model("actor", folder, dtype="f32", adapter=adapter), adapter)
    write_hf(tmp_path / "export", folder, tensors, export)
    tokens = torch.tensor([some_prompts(6)[3]])
    with torch.no_grad():
        wanted = peft_model(folder, adapter, values, torch.float32)(tokens).logits
        merged = load_hf(str(tmp_path / "export"))(tokens).logits
        base: PreTrainedModel = load_hf(folder)
        without = base(tokens).logits
        read = PeftModel.from_pretrained(base, tmp_path / "export" / "adapter")(tokens).logits
    torch.testing.assert_close(merged, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(read, wanted, atol=0.0, rtol=0.0)
    assert (without - wanted).abs().max() > 0.1


def test_an_adapter_begins_as_its_base_and_alike_on_every_layout(pool: Pool, folders: Folders) -> None:
    folder = folders.of("llama", False)
    whole = pool.run(1, first_on_rank, folder, MESHES["one"])[0]
    for part in pool.run(4, first_on_rank, folder, MESHES["tp2pp2"]):
        for name, (box, values) in part.items():
            assert (values == whole[name][1][tuple(slice(a, b) for a, b in box)]).all(), name
    halves = {half: [v for n, (_, v) in whole.items() if half in n] for half in ("lora_A", "lora_B")}
    assert all(not values.any() for values in halves["lora_B"])
    bound = 64**-0.5  # of the matrices that read hidden states, as torch.nn.Linear
    largest = max(abs(v).max() for v in halves["lora_A"] if v.shape[1] == 64)
    assert 0.9 * bound < largest <= bound


def first_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh) -> Any:
    return read_weights(make_engine(rank, new_group, folder, mesh, adapter=ALL))
