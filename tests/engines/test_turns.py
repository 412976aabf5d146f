"""Further turns of a conversation, against transformers and over layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hflow.graph.ir import Node, Output
from hflow.plan.layout import Mesh
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import Rows, from_lists, from_strings
from hflow.runtime.tokenizer import load_tokenizer
from tests.engines.models import EOS, Folders, load_hf, make_call, make_engine, share, some_prompts, type_of
from tests.engines.processes import Pool
from tests.engines.test_generate import MESHES, as_lists, digest_of, hf_scores, together

ROWS, NEW, LONGEST = 9, 8, 4
OBSERVATIONS = ["=12", "", "a", "=123456", "", "-", "12345", "1234", ""]
KEPT = ["=12", "", "a", "=123", "", "-", "1234", "1234", ""]


def further_node(temperature: float, limit: int = LONGEST) -> Node:
    options = {"max_new_tokens": NEW, "temperature": temperature, "max_observation_tokens": limit}
    outputs = tuple(Output(port, type_of(ROWS)) for port in ("tokens", "logprobs", "mask", "text"))
    return Node("turn_2", "generate", outputs=outputs, options=options)


def first_turn() -> dict[str, Rows]:
    """Responses of 0 to 5 tokens, every third with an end of sequence."""
    generator = torch.Generator().manual_seed(3)
    prompts = some_prompts(ROWS)
    responses = [torch.randint(3, 25, (i % 6,), generator=generator).tolist() for i in range(ROWS)]
    responses = [r + [EOS] * (i % 3 == 0) for i, r in enumerate(responses)]
    lengths = torch.tensor([len(r) for r in responses])
    total = int(lengths.sum())
    return {
        "tokens": from_lists([p + r for p, r in zip(prompts, responses)]),
        "mask": Rows(torch.rand(total, generator=generator) > 0.2, lengths),
        "logprobs": Rows(-torch.rand(total, generator=generator), lengths),
    }


def turn_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    observations: list[str],
    node: Node,
    micro_batch: int,
    stream: int = 1,
) -> Any:
    engine = make_engine(rank, new_group, folder, mesh)
    call = make_call(engine, rank, node, ROWS, micro_batch, stream=stream)
    inputs = {**first_turn(), "observation": from_strings(observations)}
    mine = share(mesh, rank, ROWS)
    try:
        result = engine.run(call, {name: rows.slice(*mine) for name, rows in inputs.items()})
    except NodeError as error:
        return error.message
    rows = {name: as_lists(result.outputs[name]) for name in ("tokens", "logprobs", "mask")}
    return rows | {"text": result.outputs["text"].strings()}, dict(result.metrics), result.digest


@pytest.mark.parametrize("layout,micro_batch", [("one", 9), ("one", 2), ("tp2dp2", 3)])
def test_a_greedy_turn_equals_transformers(
    pool: Pool, folders: Folders, layout: str, micro_batch: int
) -> None:
    folder, mesh = folders.of("llama", False), MESHES[layout]
    arguments = (folder, mesh, OBSERVATIONS, further_node(0.0), micro_batch)
    results = pool.run(len(mesh.devices), turn_on_rank, *arguments)
    found, before = together(results, mesh), {name: as_lists(rows) for name, rows in first_turn().items()}
    model, tokenizer = load_hf(folder), load_tokenizer(folder)
    for row, observation in enumerate(KEPT):
        old, kept = len(before["mask"][row]), tokenizer.encode([observation])[0]
        context = [*before["tokens"][row], *kept]
        expected = context
        if observation:
            with torch.no_grad():
                expected = model.generate(  # type: ignore[operator]
                    torch.tensor([context]),
                    max_new_tokens=NEW,
                    do_sample=False,
                    eos_token_id=EOS,
                    pad_token_id=0,
                )[0].tolist()
        new = len(expected) - len(context)
        assert found["tokens"][row] == expected
        assert found["mask"][row] == before["mask"][row] + [False] * len(kept) + [True] * new
        assert found["logprobs"][row][:old] == before["logprobs"][row]
        assert found["logprobs"][row][old : old + len(kept)] == [0.0] * len(kept)
        scored = hf_scores(folder, expected, new, 1.0)[0]
        assert found["logprobs"][row][old + len(kept) :] == pytest.approx(scored, abs=1e-5)
        assert found["text"][row] == tokenizer.decode([expected[len(some_prompts(ROWS)[row]) :]])[0]
    assert sum(digest for _, _, digest in results if digest is not None) % 2**64 == digest_of(found["tokens"])
    cut, weight = map(sum, zip(*(m["cut_observations"] for _, m, _ in results if m)))
    assert (cut, weight) == (2, 1)
    lengths = [metrics["response_length"] for _, metrics, _ in results if metrics]
    assert [sum(v) for v in zip(*lengths)] == [sum(map(len, found["mask"])), ROWS]


def test_a_sampled_turn_does_not_depend_on_the_plan(pool: Pool, folders: Folders) -> None:
    folder, node, found = folders.of("qwen2", False), further_node(1.3), []
    for layout, micro_batch in [("one", 64), ("one", 1), ("tp2", 64), ("dp2", 3), ("dp4 regrouped", 2)]:
        mesh = MESHES[layout]
        results = pool.run(len(mesh.devices), turn_on_rank, folder, mesh, OBSERVATIONS, node, micro_batch)
        found.append(together(results, mesh))
    assert all(rows["tokens"] == found[0]["tokens"] for rows in found)
    others = list(OBSERVATIONS)
    others[0] = ""  # a row's random numbers are its own: those of the others stay
    (result,) = pool.run(1, turn_on_rank, folder, MESHES["one"], others, node, 64)
    assert result[0]["tokens"][1:] == found[0]["tokens"][1:] != result[0]["tokens"]
    (result,) = pool.run(1, turn_on_rank, folder, MESHES["one"], OBSERVATIONS, node, 64, 2)
    differ = [a != b for a, b in zip(result[0]["tokens"], found[0]["tokens"])]
    assert sum(differ) > 3, "another stream draws other tokens"
    assert not any(d for d, observation in zip(differ, OBSERVATIONS) if not observation)


def test_all_rows_may_be_finished(pool: Pool, folders: Folders) -> None:
    mesh, before = MESHES["dp2"], first_turn()
    results = pool.run(2, turn_on_rank, folders.of("llama", False), mesh, [""] * ROWS, further_node(1.0), 4)
    found = together(results, mesh)
    assert all(found[name] == as_lists(before[name]) for name in ("tokens", "logprobs", "mask"))


@pytest.mark.parametrize(
    "row,observation,limit,message",
    [
        (3, "1Z", 4, "observation of row 3: the tokenizer has no token for 'Z' in '1Z'"),
        (2, "1" * 60, 60, "positions, the model has 64"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    pool: Pool, folders: Folders, row: int, observation: str, limit: int, message: str
) -> None:
    observations = [""] * ROWS
    observations[row] = observation
    arguments = (folders.of("llama", False), MESHES["one"], observations, further_node(1.0, limit), 4)
    (answer,) = pool.run(1, turn_on_rank, *arguments)
    assert message in answer
