"""Truncated sampling on the engines that compute in the worker, and log-probs over the kept sets, against
plain transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hflow.graph.infer.kinds.generate import END_TOKEN, LENGTH, STOP, WAS_FINISHED
from hflow.graph.ir import Node, Output
from hflow.graph.types import Truncation
from hflow.plan.layout import Mesh
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.logprobs import log_probs
from hflow.runtime.engines.protocol import EngineCall, NodeError
from hflow.runtime.kept import KeptSets
from hflow.runtime.rows import Rows, from_lists, from_strings
from hflow.runtime.tokenizer import load_tokenizer
from tests.engines.models import (
    ADAM,
    EOS,
    Folders,
    load_hf,
    make_call,
    make_engine,
    score_node,
    share,
    some_prompts,
    train_node,
    type_of,
)
from tests.engines.processes import Pool
from tests.engines.test_generate import MESHES, as_lists, together
from tests.engines.test_truncation import of_transformers
from tests.engines.transformers.test_engine import built, call

PROMPTS, SAMPLES, NEW, HEAT = 5, 3, 9, 0.8
ROWS = PROMPTS * SAMPLES
SHAPES = {
    "top_p": {"top_p": 0.7, "max_kept": 32},
    "top_k": {"top_k": 6, "max_kept": 6},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "max_kept": 12},
}


def shaped_node(options: dict[str, Any], rows: int = PROMPTS, n: int = SAMPLES, new: int = NEW) -> Node:
    ports = ["tokens", "logprobs", "mask", "text", "finish"] + ["kept"] * ("max_kept" in options)
    given = {"n": n, "max_new_tokens": new, "temperature": HEAT, **options}
    return Node(
        "rollout", "generate", outputs=tuple(Output(p, type_of(rows * n)) for p in ports), options=given
    )


def whole_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, options: dict[str, Any], trains: bool
) -> Any:
    """What is sampled, what is scored of it with the same weights, and the metrics of an update on it."""
    engine = make_engine(rank, new_group, folder, mesh, ADAM if trains else None)
    prompts = from_lists(some_prompts(PROMPTS)).slice(*share(mesh, rank, PROMPTS))
    sampled = engine.run(make_call(engine, rank, shaped_node(options), PROMPTS, 4), {"prompt": prompts})
    read = {name: sampled.outputs[name] for name in ("tokens", "mask", "kept")}
    scoring = make_call(engine, rank, score_node(ROWS, HEAT), ROWS, 2, unit=SAMPLES)
    scored = engine.run(scoring, read).outputs
    rows = {name: as_lists(value) for name, value in sampled.outputs.items() if name != "text"}
    rows |= {name: as_lists(value) for name, value in scored.items() if name != "logprobs"}
    rows["scored"] = as_lists(scored["logprobs"])
    metrics: dict[str, Any] = {}
    if trains:
        node = train_node(ROWS, ROWS, {"temperature": HEAT})
        given = {
            "advantages": Rows(torch.ones(len(read["mask"]))),
            "old_logprobs": sampled.outputs["logprobs"],
        }
        learning = make_call(engine, rank, node, ROWS, 2, unit=SAMPLES)
        metrics = dict(engine.run(learning, read | given).metrics)
    return rows, metrics, sampled.digest


hf_model = functools.cache(load_hf)


def oracle(folder: str, row: list[int], length: int, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """By transformers, of the response: its kept sets, and log-probs and entropy over these."""
    with torch.no_grad():
        logits = hf_model(folder)(torch.tensor([row])).logits[0, len(row) - length - 1 : -1]
    inside = of_transformers(logits, HEAT, Truncation.of(options))
    every = (logits / HEAT).masked_fill(~inside, -torch.inf).log_softmax(-1)
    chosen = every.gather(1, torch.tensor(row[len(row) - length :])[:, None]).squeeze(1)
    entropy = torch.special.entr(every.exp()).sum(-1)
    return [s.nonzero().squeeze(1).tolist() for s in inside], chosen.tolist(), entropy.tolist()


def sets_of(kept: list[int], length: int) -> list[list[int]]:
    sets = KeptSets(from_lists([kept]), torch.tensor([length]))
    return [[i for i in ids if i >= 0] for ids in sets.padded().tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_sets_and_log_probs_are_those_of_transformers(pool: Pool, folders: Folders, shape: str) -> None:
    """And the first update's ratio is 1 within 1e-5: its log-probs are those of the sampler."""
    folder, options, layouts = folders.of("qwen2", True), SHAPES[shape], ["one", "tp2dp2"]
    found = []
    for layout in layouts:
        mesh = MESHES[layout]
        results = pool.run(len(mesh.devices), whole_on_rank, folder, mesh, options, True)
        found.append(together(results, mesh))
        total, weight = (sum(x) for x in zip(*(m["mismatch"] for _, m, _ in results if "mismatch" in m)))
        assert weight == sum(map(len, found[-1]["mask"])) and total / weight < 1e-5
    assert found[0]["tokens"] == found[1]["tokens"] and found[0]["kept"] == found[1]["kept"]
    sizes = set[int]()
    for rows in found:
        for row, mask, kept, mine, scored, uncertain in zip(
            *(rows[name] for name in ("tokens", "mask", "kept", "logprobs", "scored", "entropy")), strict=True
        ):
            sets, expected, entropy = oracle(folder, row, len(mask), options)
            assert sets_of(kept, len(mask)) == sets
            # float32 sums of some hundred terms of order 1
            assert mine == pytest.approx(expected, abs=1e-5)
            assert scored == pytest.approx(expected, abs=1e-5)
            assert uncertain == pytest.approx(entropy, abs=1e-5)
            sizes |= set(map(len, sets))
    assert len(sizes) > 1 or shape == "top_k"


def kept_log_probs_on_rank(rank: int, new_group: NewGroup) -> Any:
    world = dist.get_world_size()
    group = new_group(tuple(range(world)))
    logits, targets, kept, a, b = kept_data()
    part = logits.chunk(world, -1)[rank].clone().requires_grad_()
    log_p, entropy = log_probs(part, targets, group, HEAT, kept=kept)
    (log_p @ a + entropy @ b).backward()
    assert part.grad is not None
    return log_p.detach().numpy(), entropy.detach().numpy(), part.grad.numpy()


def kept_data() -> tuple[torch.Tensor, ...]:
    """Sets of 1 to 6 of 12 tokens; the last is empty."""
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(9, 12, generator=generator)
    kept = torch.stack([torch.randperm(12, generator=generator)[:6] for _ in range(9)])
    targets = kept[:, 0].clone()
    for row in range(8):
        kept[row, 1 + row % 6 :] = -1
    kept[8] = -1
    return logits, targets, kept, *torch.randn(2, 9, generator=generator)


@pytest.mark.parametrize("world", [1, 4])
def test_gradients_over_sets_equal_plain_pytorch(pool: Pool, world: int) -> None:
    logits, _, kept, a, b = kept_data()
    z = logits.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    values = []
    for row in range(8):
        ids = kept[row][kept[row] >= 0]
        every = (z[row, ids] / HEAT).log_softmax(-1)
        values.append((every[0], -(every.exp() * every).sum()))
        total = total + values[-1][0] * a[row] + values[-1][1] * b[row]
    total.backward()
    assert z.grad is not None
    for rank, (log_p, entropy, gradient) in enumerate(pool.run(world, kept_log_probs_on_rank)):
        assert log_p.tolist() == pytest.approx([float(x.detach()) for x, _ in values] + [0.0], abs=1e-5)
        assert entropy.tolist() == pytest.approx([float(x.detach()) for _, x in values] + [0.0], abs=1e-5)
        expected = z.grad.chunk(world, -1)[rank].float()
        torch.testing.assert_close(torch.from_numpy(gradient), expected, atol=1e-5, rtol=1e-5)


def drawn_on_rank(rank: int, new_group: NewGroup, folder: str, calling: EngineCall, inputs: Any) -> Any:
    return as_lists(
        make_engine(rank, new_group, folder, MESHES["one"]).run(calling, inputs).outputs["tokens"]
    )


@pytest.mark.parametrize("engine", ["megatron", "transformers"])
def test_frequencies_follow_the_truncated_distribution(pool: Pool, folders: Folders, engine: str) -> None:
    """Pearson's chi-square of 3,000 draws of a token, at its 99.9 % quantile (Wilson-Hilferty formula)."""
    folder, count, prompt = folders.of("llama", False), 3000, [7, 12, 5]
    options = {"top_p": 0.8, "top_k": 20}
    calling = call(shaped_node(options, 1, count, 1), 1, micro_batch=count)
    inputs = {"prompt": from_lists([prompt])}
    if engine == "megatron":
        (rows,) = pool.run(1, drawn_on_rank, folder, calling, inputs)
    else:
        rows = as_lists(built(folder).run(calling, inputs).outputs["tokens"])
    with torch.no_grad():
        logits = load_hf(folder)(torch.tensor([prompt])).logits[:, -1]
    inside = of_transformers(logits, HEAT, Truncation.of(options))[0]
    p = (logits[0] / HEAT).masked_fill(~inside, -torch.inf).softmax(-1)
    seen = torch.bincount(torch.tensor([row[-1] for row in rows]), minlength=len(p))
    freedom = int(inside.sum()) - 1
    assert freedom > 2 and seen[~inside].sum() == 0
    chi_square = ((seen - count * p)[inside] ** 2 / (count * p[inside])).sum()
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_transformers_samples_and_scores_as_megatron(pool: Pool, folders: Folders) -> None:
    folder, options = folders.of("llama", False), {**SHAPES["all"], "stop": "1", "stop_token_ids": [9]}
    ((rows, _, digest),) = pool.run(1, whole_on_rank, folder, MESHES["one"], options, False)
    engine = built(folder)
    calling = call(shaped_node(options), PROMPTS)
    calling = EngineCall(**{**vars(calling), "stream": 0})
    found = engine.run(calling, {"prompt": from_lists(some_prompts(PROMPTS))})
    for port in ("tokens", "mask", "kept", "finish"):
        assert as_lists(found.outputs[port]) == rows[port], port
    assert found.digest == digest
    read = {name: found.outputs[name] for name in ("tokens", "mask", "kept")}
    scored = engine.run(call(score_node(ROWS, HEAT), ROWS), read).outputs
    for name, theirs in (("logprobs", "scored"), ("entropy", "entropy")):
        for mine, other in zip(as_lists(scored[name]), rows[theirs], strict=True):
            assert mine == pytest.approx(other, abs=1e-5)


def test_ends_are_told_and_rows_are_dropped(folders: Folders) -> None:
    """With a small `max_kept` and `mask_truncated`, against a walk over the tokens of an unmasked run."""
    folder = folders.of("llama", False)
    tokenizer, engine = load_tokenizer(folder), built(folder)
    options = {"top_k": 12, "top_p": 0.9, "stop": ["1", "22"], "stop_token_ids": [9]}
    inputs = {"prompt": from_lists(some_prompts(PROMPTS))}
    plain = engine.run(call(shaped_node(options), PROMPTS), inputs).outputs
    dropping = {**options, "max_kept": 10, "mask_truncated": True}
    found = engine.run(call(shaped_node(dropping), PROMPTS), inputs)
    assert as_lists(found.outputs["tokens"]) == as_lists(plain["tokens"])
    ends, overflown, truncated = [], 0, 0
    prompts = [prompt for prompt in some_prompts(PROMPTS) for _ in range(SAMPLES)]
    for number, (prompt, row) in enumerate(zip(prompts, as_lists(plain["tokens"]), strict=True)):
        response = row[len(prompt) :]
        *before, text = (tokenizer.decode([response[: n + 1]])[0] for n in range(len(response)))
        assert not any(t in part for part in before for t in ("1", "22")) and not {9, EOS} & {*response[:-1]}
        stopped = response[-1] == 9 or "1" in text or "22" in text
        ends.append(END_TOKEN if response[-1] == EOS else STOP if stopped else LENGTH)
        assert ends[-1] != LENGTH or len(response) == NEW
        sets, _, _ = oracle(folder, row, len(response), options)
        large = any(len(s) > 10 for s in sets)
        dropped = large or ends[-1] == LENGTH
        overflown, truncated = overflown + large, truncated + (ends[-1] == LENGTH)
        assert found.outputs["mask"].slice(number, number + 1).values.tolist() == [not dropped] * len(
            response
        )
        kept = sets_of(as_lists(found.outputs["kept"])[number], len(response))
        assert kept == ([[]] * len(response) if large else sets)
    assert found.outputs["finish"].values.tolist() == ends and {LENGTH, STOP} <= {*ends}
    assert 0 < overflown < ROWS
    assert found.metrics["overflown_rows"] == (overflown, 1.0)
    assert found.metrics["truncated_rows"] == (truncated, 1.0)


def test_a_later_turn_goes_on_with_the_sets(folders: Folders) -> None:
    folder, options = folders.of("qwen2", True), {"top_k": 8, "max_kept": 8, "stop": "1"}
    engine = built(folder)
    first = engine.run(
        call(shaped_node(options, n=1), PROMPTS), {"prompt": from_lists(some_prompts(PROMPTS))}
    )
    read = {name: first.outputs[name] for name in ("tokens", "mask", "logprobs", "kept")}
    texts = ["=1", "", "a", "", "2"]
    node = shaped_node({**options, "max_observation_tokens": 4}, n=1)
    found = engine.run(call(node, PROMPTS), {**read, "observation": from_strings(texts)}).outputs
    scored = engine.run(
        call(score_node(PROMPTS, HEAT), PROMPTS), {n: found[n] for n in ("tokens", "mask", "kept")}
    )
    before, after = as_lists(first.outputs["kept"]), as_lists(found["kept"])
    for row, text in enumerate(texts):
        mask, was = as_lists(found["mask"])[row], as_lists(first.outputs["mask"])[row]
        sets = sets_of(after[row], len(mask))
        assert sets[: len(was)] == sets_of(before[row], len(was))
        assert [bool(s) for s in sets] == mask
        assert (as_lists(found["finish"])[row][0] == WAS_FINISHED) == (not text)
        mine = scored.outputs["logprobs"].slice(row, row + 1).values.tolist()
        assert mine == pytest.approx(as_lists(found["logprobs"])[row], abs=1e-5)


def test_a_set_that_lacks_its_token_is_refused(folders: Folders) -> None:
    inputs = {"tokens": from_lists([[5, 6], [5, 7]]), "mask": from_lists([[1], [1]], torch.bool)}
    kept = KeptSets.of(torch.tensor([2, 1]), torch.tensor([6, 9, 8]), torch.tensor([1, 1]))
    with pytest.raises(NodeError, match="a token of row 1 is not in the set"):
        built(folders.of("llama", False)).run(call(score_node(2, HEAT), 2), {**inputs, "kept": kept.rows})
