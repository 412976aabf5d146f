"""Router replay against the sampler's log-probs, and against transformers with the same choices forced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from hflow.graph.infer.kinds.generate import ROUTES
from hflow.graph.ir import Output
from hflow.plan.layout import Mesh
from hflow.plan.read_shape import read_shape
from hflow.plan.routes import choices
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.moe.layer import MixtureOfExperts
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import Rows, from_lists
from tests.engines.models import (
    ADAM,
    Folders,
    generate_node,
    load_hf,
    make_call,
    make_engine,
    score_node,
    share,
    some_prompts,
    type_of,
)
from tests.engines.processes import Pool
from tests.engines.test_strategies import train_on_rank
from tests.engines.test_train import MESHES, PPO, Reference, compare, reference, rollout

PROMPTS, SAMPLES, NEW = 5, 3, 9
ROWS = PROMPTS * SAMPLES
ONE, EP2 = MESHES["one"], Strategy(ep=2)
NOISE = 2e-7  # of the size of rounding: weights are of size 0.1


def tie(model: torch.nn.Module, noise: float) -> None:
    """Of every two experts of a layer the scores are equal, but for the noise."""
    for layer in (module for module in model.modules() if isinstance(module, MixtureOfExperts)):
        weight = layer.router.weight.data
        weight[1::2] = weight[::2]
        weight += noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(layer.number))


def sampled_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, tied: bool = False
) -> dict[str, Rows]:
    engine = make_engine(rank, new_group, folder, mesh)
    if tied:
        tie(engine.model, 0.0)
    node = generate_node(PROMPTS, SAMPLES, NEW, 0.8)
    node = replace(node, outputs=(*node.outputs, Output(ROUTES, type_of(ROWS))))
    prompts = from_lists(some_prompts(PROMPTS)).slice(*share(mesh, rank, PROMPTS))
    found = engine.run(make_call(engine, rank, node, PROMPTS, 4), {"prompt": prompts}).outputs
    return {name: found[name] for name in ("tokens", "mask", "logprobs", ROUTES)}


def scored_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows], strategy: Strategy
) -> Any:
    """Of this replica's rows, with and without the sampler's routes."""
    engine = make_engine(rank, new_group, folder, mesh, strategy=strategy)
    tie(engine.model, NOISE)
    call = make_call(engine, rank, score_node(ROWS, 0.8), ROWS, 2, unit=SAMPLES, strategy=strategy)
    start, stop = (SAMPLES * at for at in share(mesh, rank, PROMPTS))
    read = {name: data[name].slice(start, stop) for name in ("tokens", "mask", ROUTES)}
    replayed = engine.run(call, read).outputs
    del read[ROUTES]
    chosen = engine.run(call, read).outputs
    return (start, *(x["logprobs"].values.numpy() for x in (replayed, chosen))) if chosen else None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_routes_are_what_transformers_chooses(pool: Pool, folders: Folders, family: str) -> None:
    """Of prompts that are read in one batch with shorter ones, and of all response tokens but the last."""
    folder = folders.of(family, False)
    shape, model = read_shape(folder), load_hf(folder)
    assert shape.moe
    (found,) = pool.run(1, sampled_on_rank, folder, ONE)
    assert found[ROUTES].values.dtype == torch.int16
    assert torch.equal(found[ROUTES].row_lengths, found["tokens"].row_lengths * choices(shape))
    for row, tokens in enumerate(found["tokens"].lists()):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(shape.moe.top_k).indices for layer in logits], 1)
        mine = found[ROUTES].slice(row, row + 1).values.view(expected.shape)
        assert (mine[-1] == -1).all()
        assert torch.equal(mine[:-1].sort(-1).values.long(), expected[:-1].sort(-1).values)


@pytest.mark.matrix(3, cover=False)
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [("tp2dp2", EP2), ("pp2dp2", EP2), ("one", PLAIN), ("tp2", PLAIN), ("pp2", PLAIN), ("dp2", EP2)],
)
def test_log_probs_are_the_samplers(pool: Pool, folders: Folders, layout: str, strategy: Strategy) -> None:
    """Of experts in pairs with equal scores, a change of rounding's size in them chooses the other."""
    folder, mesh = folders.of("qwen3_moe", False), MESHES[layout]
    (data,) = pool.run(1, sampled_on_rank, folder, ONE, True)
    results = pool.run(len(mesh.devices), scored_on_rank, folder, mesh, data, strategy)
    parts = {found[0]: found[1:] for found in results if found}
    replayed, chosen = (
        torch.cat([torch.from_numpy(parts[start][i]) for start in sorted(parts)]) for i in (0, 1)
    )
    own = data["logprobs"].values
    # float32 sums of some hundred terms of order 1
    torch.testing.assert_close(replayed, own, atol=1e-5, rtol=0)
    assert (chosen - own).abs().max() > 1e-3


@contextmanager
def forced(model: Any, folder: str, routes: torch.Tensor) -> Iterator[None]:
    """transformers' routers choose `routes`, ``[tokens, layers, top_k]``, with their own probabilities."""
    moe = read_shape(folder).moe
    assert moe

    def hook(given: torch.Tensor) -> Any:
        def chosen(_: Any, __: Any, found: tuple[torch.Tensor, ...]) -> Any:
            p = found[0].softmax(-1, dtype=torch.float32)
            experts = given.where(given >= 0, found[2])
            weights = p.gather(1, experts)
            if moe.normalised:
                weights = weights / weights.sum(-1, keepdim=True)
            return found[0], weights.to(found[1].dtype), experts

        return chosen

    routers = [module for name, module in model.named_modules() if name.endswith(".gate")]
    hooks = [r.register_forward_hook(hook(given)) for r, given in zip(routers, routes.unbind(1), strict=True)]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


class Forced(Reference):
    """Its routers choose what the data's routes say."""

    def __init__(self, folder: str, options: dict[str, Any]):
        super().__init__(folder, options)
        self.folder, self.shape = folder, read_shape(folder)

    def row(self, data: dict[str, Rows], row: int) -> tuple[torch.Tensor, ...]:
        assert self.shape.moe
        found = data[ROUTES].slice(row, row + 1).values.long()
        routes = found.view(-1, self.shape.expert_layers, self.shape.moe.top_k)
        with forced(self.model, self.folder, routes):
            return super().row({name: rows for name, rows in data.items() if name != ROUTES}, row)


def drawn_routes(folder: str, tokens: Rows) -> Rows:
    """Any different experts for every token and layer; none for the last token of a row."""
    shape, generator = read_shape(folder), torch.Generator().manual_seed(2)
    assert shape.moe
    size = len(tokens.values), shape.expert_layers, shape.moe.num_experts
    experts = torch.rand(size, generator=generator).topk(shape.moe.top_k).indices.flatten(1)
    experts[tokens.row_lengths.cumsum(0) - 1] = -1
    return Rows(experts.flatten().to(torch.int16), tokens.row_lengths * choices(shape))


@pytest.mark.matrix(3, cover=False)
@pytest.mark.parametrize(
    ("layout", "strategy", "family"),
    [
        ("pp2dp2", Strategy("full", ep=2), "mixtral"),
        ("tp2dp2", EP2, "qwen3_moe"),
        ("one", PLAIN, "qwen3_moe probabilities"),
        ("dp2", EP2, "qwen3_moe"),
        ("tp2", PLAIN, "mixtral"),
        ("pp2", PLAIN, "qwen3_moe"),
    ],
)
def test_gradients_equal_plain_pytorch(
    pool: Pool,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    strategy: Strategy,
    family: str,
) -> None:
    """Whatever experts are given: routers learn from the weights of these, by their own probabilities."""
    folder, mesh = folders.of(family, False), MESHES[layout]
    data = rollout(folder)
    data = {**data, ROUTES: drawn_routes(folder, data["tokens"])}
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    monkeypatch.setattr("tests.engines.test_train.Reference", Forced)
    metrics, named = reference(folder, data, options, 1, 1)
    results = pool.run(len(mesh.devices), train_on_rank, folder, mesh, data, options, 1, strategy)
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare([found[:2] for found in results], metrics, named, atol=1e-6)
    gate = next(name for name in named if name.endswith("gate.weight"))
    assert named[gate][0].abs().max() > 1e-3, "the router learns"


def test_a_prompt_is_shared_where_its_routes_are_the_same() -> None:
    tokens, mask = from_lists([[3, 4, 5]] * 3), Rows(torch.ones(3, dtype=torch.bool), torch.ones(3).long())
    routes = Rows(torch.tensor([0, 1, -1, 0, 2, -1, 0, 1, -1], dtype=torch.int16), torch.full((3,), 3))
    sequences = Sequences.of(tokens, mask, torch.device("cpu"))
    assert sequences.same_prompt.tolist() == [0, 0, 0]
    assert sequences.routed(routes, 1).same_prompt.tolist() == [0, 1, 0]


def wrong_on_rank(rank: int, new_group: NewGroup, folder: str, routes: Rows) -> str:
    engine, data = make_engine(rank, new_group, folder, ONE), rollout(folder)
    call = make_call(engine, rank, score_node(len(data["tokens"]), 1.0), len(data["tokens"]), 4)
    read = {"tokens": data["tokens"], "mask": data["mask"], ROUTES: routes}
    with pytest.raises(NodeError) as caught:
        engine.run(call, read)
    return str(caught.value)


def test_routes_of_other_tokens_are_refused(pool: Pool, folders: Folders) -> None:
    folder = folders.of("qwen3_moe", False)
    routes = drawn_routes(folder, rollout(folder)["tokens"])
    (short,) = pool.run(1, wrong_on_rank, folder, replace(routes, lengths=routes.row_lengths - 3))
    assert "`routes` has not 12 experts for each token of row 0" in short
    values = routes.values.clone()
    values[0] = 8
    (unknown,) = pool.run(1, wrong_on_rank, folder, replace(routes, values=values))
    assert "`routes` names an expert that is none of 8" in unknown
