"""The transformers engine against Megatron's on the same weights: the same tokens, and close numbers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hflow.diagnostics import HflowError
from hflow.graph.ir import Head, Model, Node
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.protocol import EngineCall, ModelEngine, ModelSetup, NodeError
from hflow.runtime.engines.transformers.engine import TransformersModel
from hflow.runtime.rows import Rows, from_lists
from hflow.runtime.tokenizer import load_tokenizer
from tests.engines.models import VARIANTS, Folders, generate_node, make_engine, score_node, some_prompts
from tests.engines.processes import Pool

PROMPTS, SAMPLES, NEW = 7, 3, 9
CLOSE = 1e-5  # float32 sums of some hundred terms of order 1
ONE = Mesh.of((0,))


def built(folder: str, head: Head = "lm") -> TransformersModel:
    made = TransformersModel.build(
        ModelSetup(
            Model("actor", folder, head, False, "f32"), read_shape(folder).with_head(head), Sharding(ONE), 0,
            torch.device("cpu"), load_tokenizer(folder), lambda _: pytest.fail("it needs no group"), (), True,
            0, 0, {}, threading.Event(), lambda _: None,
        )
    )  # fmt: skip
    assert made
    return made


def call(node: Node, rows: int, micro_batch: int = 4) -> EngineCall:
    plan = NodePlan(node.name, node.op, "actor", "transformers", ONE, micro_batch, 0.0, 0.0, 0)
    return EngineCall(node, plan, 0, rows, seed=11, step=3, stream=1)


def lists(rows: Rows) -> list[list[Any]]:
    return [rows.slice(i, i + 1).values.tolist() for i in range(len(rows))]


def on_megatron(
    rank: int, new_group: NewGroup, folder: str, head: Head, call: EngineCall, inputs: dict[str, Rows]
) -> Any:
    found = make_engine(rank, new_group, folder, ONE, head=head).run(call, inputs)
    return dict(found.outputs), dict(found.metrics), found.digest


def both(
    pool: Pool, engine: ModelEngine, folder: str, head: Head, call: EngineCall, inputs: dict[str, Rows]
) -> tuple[Any, Any]:
    """Outputs, metrics and digest: transformers' and Megatron's."""
    found = engine.run(call, inputs)
    (theirs,) = pool.run(1, on_megatron, folder, head, call, inputs)
    return (dict(found.outputs), dict(found.metrics), found.digest), theirs


@pytest.mark.matrix(24)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("variant", "tied"),
    [(variant, tied) for variant in VARIANTS for tied in (False, True)],
)
def test_tokens_equal_megatrons(
    pool: Pool, folders: Folders, variant: str, tied: bool, temperature: float
) -> None:
    folder = folders.of(variant, tied)
    node = generate_node(PROMPTS, SAMPLES, NEW, temperature)
    inputs = {"prompt": from_lists(some_prompts(PROMPTS))}
    mine, theirs = both(pool, built(folder), folder, "lm", call(node, PROMPTS, 2), inputs)
    assert mine[1:] == theirs[1:]
    for port in ("tokens", "mask", "text"):
        assert lists(mine[0][port]) == lists(theirs[0][port])
    assert torch.allclose(mine[0]["logprobs"].values, theirs[0]["logprobs"].values, atol=CLOSE)
    if temperature:
        assert len({len(row) for row in lists(mine[0]["mask"])}) > 1, "some rows end early"


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_scores_are_close_to_megatrons(pool: Pool, folders: Folders, head: Head) -> None:
    folder = folders.of("qwen2", False, head)
    tokens = from_lists([[*prompt, 5, 9, 4] for prompt in some_prompts(PROMPTS)])
    inputs = {"tokens": tokens, "mask": from_lists([[1, 0, 1]] * PROMPTS, torch.bool)}
    scoring = call(score_node(PROMPTS, 0.7), PROMPTS)
    (outputs, metrics, _), theirs = both(pool, built(folder, head), folder, head, scoring, inputs)
    assert outputs.keys() == theirs[0].keys() and metrics.keys() == theirs[1].keys()
    for port, rows in outputs.items():
        assert rows.values.shape == theirs[0][port].values.shape
        assert torch.allclose(rows.values, theirs[0][port].values, atol=CLOSE)


@pytest.mark.parametrize("variant", ["llama", "mixtral"])
def test_weights_are_written_where_it_computes(folders: Folders, variant: str) -> None:
    """Another model's, box by box, after its own were released."""
    engine, other = built(folders.of(variant, False)), built(folders.of(variant, False))
    generator = torch.Generator().manual_seed(0)
    for parameter in other.model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    prompts = {"prompt": from_lists(some_prompts(PROMPTS))}
    generating = call(generate_node(PROMPTS, 1, NEW, 1.0), PROMPTS)
    before = engine.run(generating, prompts).digest
    engine.weights.release()
    with pytest.raises(NodeError, match="the weights it reads were released"):
        engine.run(generating, prompts)
    engine.weights.allocate()
    for name in engine.weights.names():
        (rows, *columns) = engine.weights.box(name)
        for half in ((0, rows[1] // 2), (rows[1] // 2, rows[1])):
            box = (half, *columns)
            engine.weights.view(name, box).copy_(other.weights.view(name, box))
    after = engine.run(generating, prompts).digest
    assert before != after == other.run(generating, prompts).digest


def test_a_number_that_is_not_finite_is_named(folders: Folders) -> None:
    engine = built(folders.of("llama", False))
    name = "model.norm.weight"
    engine.weights.view(name, engine.weights.box(name)).fill_(float("nan"))
    generating = call(generate_node(2, 1, NEW, 1.0), 2)
    with pytest.raises(NodeError, match="a logit before response token 0 of row 0 is nan") as caught:
        engine.run(generating, {"prompt": from_lists([[3, 4], [5]])})
    assert caught.value.code == "HF405"


def test_a_folder_that_is_not_the_model_is_refused(folders: Folders) -> None:
    with pytest.raises(HflowError, match="HF406"):
        built(folders.of("llama", False, "scalar"))
