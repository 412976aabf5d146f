"""Generation and scoring against transformers, and against each other over layouts."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hflow.plan.layout import Mesh
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron import attention, sight
from hflow.runtime.engines.megatron.cpu_kernels.library import call, library
from hflow.runtime.engines.megatron.decoder import Decoder
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import Rows, from_lists
from hflow.runtime.tokenizer import load_tokenizer
from tests.engines.memory import torch_operations
from tests.engines.models import (
    EOS,
    VARIANTS,
    Folders,
    generate_node,
    load_hf,
    make_call,
    make_engine,
    score_node,
    share,
    some_prompts,
)
from tests.engines.processes import Pool

PROMPTS, SAMPLES, NEW = 7, 3, 9
MESHES = {
    "one": Mesh.of((0,)),
    "tp2": Mesh.of((0, 1), tp=2),
    "dp2": Mesh.of((0, 1), dp=2),
    "tp2dp2": Mesh.of((0, 1, 2, 3), dp=2, tp=2),
    "regrouped": Mesh.of((0, 2, 1, 3), dp=2, tp=2),
    "dp4 regrouped": Mesh.of((0, 2, 1, 3), dp=4),
    "pp2": Mesh.of((0, 1), pp=2),
    "tp2pp2": Mesh.of((0, 1, 2, 3), pp=2, tp=2),
}


def generate_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, n: int, temperature: float, micro_batch: int
) -> Any:
    """Outputs as lists of rows, with metrics and digest."""
    engine = make_engine(rank, new_group, folder, mesh)
    call = make_call(engine, rank, generate_node(PROMPTS, n, NEW, temperature), PROMPTS, micro_batch)
    prompts = from_lists(some_prompts(PROMPTS)).slice(*share(mesh, rank, PROMPTS))
    result = engine.run(call, {"prompt": prompts})
    outputs = result.outputs
    rows = {name: as_lists(outputs[name]) for name in ("tokens", "logprobs", "mask")}
    return rows | {"text": outputs["text"].strings()}, dict(result.metrics), result.digest


def as_lists(rows: Rows) -> list[list[Any]]:
    return [rows.slice(i, i + 1).values.tolist() for i in range(len(rows))]


def together(results: list[Any], mesh: Mesh) -> dict[str, list[Any]]:
    """The rows of all data-parallel replicas; ranks of one replica must agree exactly.

    Only the last pipeline stage has rows.
    """
    replicas: dict[int, Any] = {}
    for rank, (rows, _, _) in enumerate(results):
        if mesh.coordinates(rank)["pp"] < mesh.pp - 1:
            assert rows == {}
            continue
        assert replicas.setdefault(mesh.coordinates(rank)["dp"], rows) == rows
    return {name: [row for i in sorted(replicas) for row in replicas[i][name]] for name in replicas[0]}


@pytest.mark.matrix(24)
@pytest.mark.parametrize("layout,micro_batch", [("one", 7), ("one", 2), ("tp2", 7), ("tp2dp2", 3)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers(
    pool: Pool, folders: Folders, variant: str, layout: str, micro_batch: int
) -> None:
    folder, mesh = folders.of(variant, False), MESHES[layout]
    results = pool.run(len(mesh.devices), generate_on_rank, folder, mesh, 1, 0.0, micro_batch)
    found, model = together(results, mesh), load_hf(folder)
    stopped = 0
    for prompt, tokens, mask, text in zip(
        some_prompts(PROMPTS), found["tokens"], found["mask"], found["text"]
    ):
        with torch.no_grad():
            expected = model.generate(  # type: ignore[operator]
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=EOS, pad_token_id=0
            )[0].tolist()
        assert tokens == expected
        assert mask == [True] * (len(expected) - len(prompt))
        assert text == load_tokenizer(folder).decode([expected[len(prompt) :]])[0]
        stopped += expected[-1] == EOS
    assert 0 <= stopped < PROMPTS


def generate_in_turns(rank: int, new_group: NewGroup, folder: str, mesh: Mesh) -> Any:
    with patch.object(attention, "CHUNK", 2), patch.object(sight, "CHUNK", 2):
        return generate_on_rank(rank, new_group, folder, mesh, 1, 0.0, PROMPTS)


@pytest.mark.parametrize("variant", ["llama", "qwen3 windows"])
def test_long_prompts_are_read_in_turns(pool: Pool, folders: Folders, variant: str) -> None:
    """With padding, one mask for all of their tokens would grow with the square of their number."""
    folder, mesh = folders.of(variant, False), MESHES["one"]
    whole, turns = (
        pool.run(1, function, folder, mesh, *more)[0][0]
        for function, more in ((generate_on_rank, (1, 0.0, PROMPTS)), (generate_in_turns, ()))
    )
    assert turns["tokens"] == whole["tokens"]
    for mine, theirs in zip(turns["logprobs"], whole["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)  # float32 sums in another order


def score_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    tokens: Rows,
    mask: Rows,
    temperature: float,
    micro_batch: int,
) -> Any:
    engine = make_engine(rank, new_group, folder, mesh)
    rows = len(tokens)
    call = make_call(engine, rank, score_node(rows, temperature), rows, micro_batch)
    inputs = {
        name: value.slice(*share(mesh, rank, rows)) for name, value in (("tokens", tokens), ("mask", mask))
    }
    outputs = engine.run(call, inputs).outputs
    return {name: as_lists(value) for name, value in outputs.items()}, {}, None


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_scored_and_transformers_log_probs_agree(
    pool: Pool, folders: Folders, temperature: float
) -> None:
    folder, one = folders.of("qwen2", True), MESHES["one"]
    rollout = together(pool.run(1, generate_on_rank, folder, one, SAMPLES, temperature, 64), one)
    tokens = from_lists(rollout["tokens"])
    mask = from_lists(rollout["mask"], torch.bool)
    expected = [
        hf_scores(folder, row, len(m), temperature) for row, m in zip(rollout["tokens"], rollout["mask"])
    ]
    for (log_probs, _), mine in zip(expected, rollout["logprobs"]):
        assert mine == pytest.approx(log_probs, abs=1e-5)
    for layout, micro_batch in [("one", 5), ("tp2", 50), ("dp2", 4), ("pp2", 4), ("tp2pp2", 2)]:
        mesh = MESHES[layout]
        results = pool.run(
            len(mesh.devices), score_on_rank, folder, mesh, tokens, mask, temperature, micro_batch
        )
        scored = together(results, mesh)
        for (log_probs, entropy), mine, uncertain in zip(
            expected, scored["logprobs"], scored["entropy"], strict=True
        ):
            # float32 sums of some hundred terms of order 1
            assert mine == pytest.approx(log_probs, abs=1e-5)
            assert uncertain == pytest.approx(entropy, abs=1e-5)


def hf_scores(
    folder: str, tokens: list[int], length: int, temperature: float
) -> tuple[list[float], list[float]]:
    row = torch.tensor(tokens)
    with torch.no_grad():
        logits = load_hf(folder)(row[None]).logits[0, len(row) - length - 1 : -1] / temperature
    log_p = logits.log_softmax(-1)
    chosen = log_p.gather(1, row[len(row) - length :, None]).squeeze(1)
    return chosen.tolist(), (-(log_p.exp() * log_p).sum(-1)).tolist()


def test_samples_do_not_depend_on_the_plan(pool: Pool, folders: Folders) -> None:
    folder = folders.of("llama", False)
    found, digests = [], set()
    for layout, micro_batch in [
        ("one", 64),
        ("one", 6),
        ("one", 2),
        ("tp2", 64),
        ("dp2", 3),
        ("regrouped", 64),
        ("dp4 regrouped", 4),
    ]:
        mesh = MESHES[layout]
        results = pool.run(len(mesh.devices), generate_on_rank, folder, mesh, SAMPLES, 1.0, micro_batch)
        found.append(together(results, mesh))
        digests.add(sum(digest for _, _, digest in results if digest is not None) % 2**64)
        lengths = [metrics["response_length"] for _, metrics, _ in results if metrics]
        total = sum(map(len, found[-1]["mask"]))
        assert [sum(values) for values in zip(*lengths)] == [total, PROMPTS * SAMPLES]
    assert all(rows["tokens"] == found[0]["tokens"] for rows in found)
    assert digests == {digest_of(found[0]["tokens"])}
    tokens = found[0]["tokens"]
    assert len({tuple(row) for row in tokens}) == len(tokens), "samples of one prompt differ"
    assert len({len(m) for m in found[0]["mask"]}) > 1, "some rows end early"


def by_torch_on_rank(rank: int, new_group: NewGroup, folder: str) -> Any:
    """Without kernels each row has its prompt's keys and values again."""
    with torch_operations():
        assert library() is None
        return generate_on_rank(rank, new_group, folder, MESHES["one"], SAMPLES, 1.0, 64)


@pytest.mark.parametrize("variant", ["llama", "gemma2", "gpt_oss"])
def test_rows_that_share_a_prompt_draw_the_same(pool: Pool, folders: Folders, variant: str) -> None:
    folder = folders.of(variant, False)
    [(shared, _, _)] = pool.run(1, generate_on_rank, folder, MESHES["one"], SAMPLES, 1.0, 64)
    [(repeated, _, _)] = pool.run(1, by_torch_on_rank, folder)
    assert shared["tokens"] == repeated["tokens"]
    for mine, theirs in zip(shared["logprobs"], repeated["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5)


def blocks_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh, n: int) -> dict[str, int]:
    """How often a layer's parts were made by one call each."""
    with patch("hflow.runtime.engines.megatron.cpu_kernels.layer.call", wraps=call) as calls:
        generate_on_rank(rank, new_group, folder, mesh, n, 1.0, 256)
    return Counter(made.args[0] for made in calls.call_args_list)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "gemma2", "gpt_oss", "mixtral"])
def test_layers_of_few_rows_take_two_calls(pool: Pool, folders: Folders, variant: str) -> None:
    """Also where tp splits them: here two ranks each. Experts are called on their own."""
    folder, layers = folders.of(variant, False), 4
    for found in pool.run(2, blocks_on_rank, folder, MESHES["tp2"], 1):
        assert found["attention_block"] == layers * (NEW - 1)  # all but the first token
        assert found["mlp_block"] == (0 if variant in ("gpt_oss", "mixtral") else layers * NEW)
    [found] = pool.run(1, blocks_on_rank, folder, MESHES["one"], 20)  # 140 rows
    assert not found["attention_block"]


def stacks_on_rank(rank: int, new_group: NewGroup, folder: str) -> int:
    """How often all layers were made by one call."""
    with patch("hflow.runtime.engines.megatron.cpu_kernels.layer_stack.call", wraps=call) as calls:
        generate_on_rank(rank, new_group, folder, MESHES["one"], 1, 1.0, 256)
    return calls.call_count


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "gemma2", "mixtral"])
def test_on_one_rank_a_token_takes_one_call(pool: Pool, folders: Folders, variant: str) -> None:
    """Not with norms or experts between the blocks. The first token comes of whole prompts."""
    [found] = pool.run(1, stacks_on_rank, folders.of(variant, False))
    assert found == (0 if variant in ("gemma2", "mixtral") else NEW - 1)


def keys_and_values_on_rank(rank: int, new_group: NewGroup, folder: str) -> list[tuple[int, ...]]:
    """Shapes of what a layer has after prompts were read and samples begun."""
    model = make_engine(rank, new_group, folder, MESHES["one"]).model
    decoder = Decoder(model, 5 + NEW)
    cache = decoder.cache(PROMPTS, 5)
    with torch.no_grad():
        decoder(torch.ones(PROMPTS, 5, dtype=torch.int64), None, cache)
    cache.share(torch.arange(PROMPTS * SAMPLES) // SAMPLES, None, NEW)
    assert decoder.can_share and cache.prefix and cache.prefix.layers[0][0].is_contiguous()
    return [tuple(memory.shape) for layers in (cache.prefix.layers, cache.layers) for memory in layers[0]]


def test_a_prompt_is_held_once(pool: Pool, folders: Folders) -> None:
    [shapes] = pool.run(1, keys_and_values_on_rank, folders.of("llama", False))
    assert [shape[::2] for shape in shapes] == [(PROMPTS, 5)] * 2 + [(PROMPTS * SAMPLES, NEW)] * 2


def digest_of(rows: list[list[int]]) -> int:
    total = 0
    for i, row in enumerate(rows):
        data = i.to_bytes(8, "little") + b"".join(token.to_bytes(4, "little") for token in row)
        total += int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return total % 2**64


def test_responses_end_with_their_first_end_of_sequence(pool: Pool, folders: Folders) -> None:
    folder, one = folders.of("llama", False), MESHES["one"]
    rollout = together(pool.run(1, generate_on_rank, folder, one, SAMPLES, 1.5, 64), one)
    prompts = [prompt for prompt in some_prompts(PROMPTS) for _ in range(SAMPLES)]
    ends = 0
    for prompt, row, mask in zip(prompts, rollout["tokens"], rollout["mask"], strict=True):
        response = row[len(prompt) :]
        assert row[: len(prompt)] == prompt and len(response) == len(mask)
        assert EOS not in response[:-1]
        assert response[-1] == EOS or len(response) == NEW
        ends += response[-1] == EOS
    assert ends > 0


def refused_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh, prompts: list[list[int]]) -> str:
    engine = make_engine(rank, new_group, folder, mesh)
    node = generate_node(len(prompts), 1, 60, 1.0)
    try:
        engine.run(make_call(engine, rank, node, len(prompts), 8), {"prompt": from_lists(prompts)})
    except NodeError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    "layout,prompts,message",
    [
        ("one", [[5], []], "a prompt is empty"),
        ("one", [[5] * 5], "need 65 positions, the model has 64"),
        ("pp2", [[5]], "use pp 1"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    pool: Pool, folders: Folders, layout: str, prompts: list[list[int]], message: str
) -> None:
    mesh = MESHES[layout]
    for answer in pool.run(len(mesh.devices), refused_on_rank, folders.of("llama", False), mesh, prompts):
        assert message in answer
