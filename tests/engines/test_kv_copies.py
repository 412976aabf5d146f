"""More ranks of tp than key-value heads: each head is on several ranks, and the model is the same.

The models have 4 heads and 2 pairs of keys and values, or one (``one pair``), so that with tp4, or with tp2,
two or four ranks have the same pair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hflow.plan.layout import Mesh
from hflow.plan.parameters import parameters
from hflow.plan.read_shape import read_shape
from hflow.plan.run_state import TRAINED
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.hf import write_hf
from hflow.runtime.rows import Rows, from_lists
from tests.engines.models import (
    ADAM,
    EOS,
    Folders,
    load_hf,
    make_call,
    make_engine,
    named_in_files,
    read_training,
    read_weights,
    share,
    some_prompts,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_adapter import ALL, OPTIONS, Matrices, PeftReference, engine_on, matrices, near, plain
from tests.engines.test_generate import NEW, PROMPTS, generate_on_rank, hf_scores, score_on_rank, together
from tests.engines.test_train import PPO, ROWS, compare, reference, rollout

MESHES = {
    "tp4": Mesh.of((0, 1, 2, 3), tp=4),
    "tp2dp2": Mesh.of((0, 1, 2, 3), dp=2, tp=2),
    "tp2cp2": Mesh.of((0, 1, 2, 3), cp=2, tp=2),
    "tp2pp2": Mesh.of((0, 1, 2, 3), pp=2, tp=2),
}


def train_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows], options: dict[str, Any],
    updates: int, strategy: Strategy, dtype: str,
) -> Any:  # fmt: skip
    """Metrics, and (box, last gradient, weight) by HF name, or without gradients (box, weight)."""
    engine = make_engine(rank, new_group, folder, mesh, options, dtype, strategy=strategy)
    node = train_node(ROWS, ROWS // updates, options, epochs=updates)
    call = make_call(engine, rank, node, ROWS, 3, strategy=strategy)
    metrics = engine.run(call, {n: rows.slice(*share(mesh, rank, ROWS)) for n, rows in data.items()}).metrics
    whole = strategy.zero == 0 and dtype == "f32"
    return dict(metrics), read_training(engine) if whole else read_weights(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "layout", "strategy"),
    [
        ("qwen2", "tp4", PLAIN),
        ("qwen3", "tp4", Strategy(sp=True, recompute="full")),
        ("gemma2", "tp4", PLAIN),
        ("gpt_oss", "tp4", PLAIN),
        ("qwen2 one pair", "tp4", PLAIN),
        ("qwen3 one pair", "tp2cp2", Strategy(sp=True)),
        ("qwen2 one pair", "tp2pp2", PLAIN),
    ],
    ids=lambda value: value if isinstance(value, str) else ("sp" if value.sp else ""),
)
def test_gradients_equal_plain_pytorch(
    pool: Pool, folders: Folders, variant: str, layout: str, strategy: Strategy
) -> None:
    folder, mesh = folders.of(variant, False), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    metrics, named = reference(folder, rollout(folder), options, 1, 1)
    arguments = folder, mesh, rollout(folder), options, 1, strategy, "f32"
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare(pool.run(4, train_on_rank, *arguments), metrics, named, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "layout", "strategy"),
    [
        ("qwen2", "tp4", PLAIN),
        ("qwen2 one pair", "tp4", Strategy(zero=1)),
        ("qwen3 one pair", "tp2dp2", Strategy(zero=1)),
        ("qwen2 one pair", "tp2cp2", Strategy(zero=1, sp=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"zero{value.zero}",
)
def test_updates_with_clipping_equal_torch_adamw(
    pool: Pool, folders: Folders, variant: str, layout: str, strategy: Strategy
) -> None:
    """The norm, by which gradients are scaled, counts each pair once; copies stay equal to the last bit."""
    folder, mesh = folders.of(variant, False), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "token_mean", "clip_grad": 0.7, "weight_decay": 0.5}
    metrics, named = reference(folder, rollout(folder), options, 2, 2)
    assert metrics["grad_norm"] > 0.7
    results = pool.run(4, train_on_rank, folder, mesh, rollout(folder), options, 2, strategy, "f32")
    if strategy.zero:  # gradients are whole on no rank
        results = [(told, {n: (box, named_at(named, n, box)[0], w) for n, (box, w) in found.items()})
                   for told, found in results]  # fmt: skip
    # Adam divides by the root of a running mean: rounding of small gradients grows over four updates
    compare(results, metrics, named, atol=1e-5)
    assert_equal_copies([{n: (held[0], held[-1]) for n, held in found.items()} for _, found in results])


def named_at(named: dict[str, Any], name: str, box: Any) -> tuple[Any, Any]:
    where = tuple(slice(a, b) for a, b in box)
    gradient, weight = named[name]
    return gradient[where].numpy(), weight[where].numpy()


def assert_equal_copies(ranks: list[dict[str, Any]]) -> None:
    """Whatever two ranks hold of keys and values is the same to the last bit, and some do hold the same."""
    seen: dict[Any, Any] = {}
    copies = 0
    for held in ranks:
        for name, (box, weight) in ((n, x) for n, x in held.items() if ".k_proj" in n or ".v_proj" in n):
            first = seen.setdefault((name, box), weight)
            copies += first is not weight
            assert (first == weight).all(), name
    assert copies


def test_copies_stay_equal_in_bf16_with_zero_1(pool: Pool, folders: Folders) -> None:
    """And the norm is that of float32, as far as bf16 can tell: it rounds in each layout elsewhere."""
    folder, options = folders.of("qwen3 one pair", False), ADAM | PPO | {"aggregate": "token_mean"}
    norms, results = list[float](), list[Any]()
    layouts = (Mesh.of((0,)), PLAIN, "f32"), (MESHES["tp2dp2"], Strategy(zero=1), "bf16")
    for mesh, strategy, dtype in layouts:
        arguments = folder, mesh, rollout(folder), options, 1, strategy, dtype
        results = pool.run(len(mesh.devices), train_on_rank, *arguments)
        norms += [told["grad_norm"][0] for told, _ in results if "grad_norm" in told]
    assert_equal_copies([found for _, found in results])
    assert norms[1] == pytest.approx(norms[0], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "gpt_oss", "gemma2", "qwen2 one pair"])
def test_greedy_tokens_and_log_probs_equal_transformers(pool: Pool, folders: Folders, variant: str) -> None:
    folder, mesh = folders.of(variant, False), MESHES["tp4"]
    found = together(pool.run(4, generate_on_rank, folder, mesh, 1, 0.0, 3), mesh)
    model = load_hf(folder)
    for prompt, tokens in zip(some_prompts(PROMPTS), found["tokens"], strict=True):
        with torch.no_grad():
            expected = model.generate(  # type: ignore[operator]
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=EOS, pad_token_id=0
            )[0].tolist()
        assert tokens == expected
    scored = [hf_scores(folder, row, len(m), 1.0)[0] for row, m in zip(found["tokens"], found["mask"])]
    for mine, theirs in zip(score(pool, folder, found), scored, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def score(pool: Pool, folder: str, found: dict[str, list[Any]]) -> list[list[float]]:
    """Log-probs of what was sampled, as the same ranks score it."""
    mesh, given = MESHES["tp4"], (from_lists(found["tokens"]), from_lists(found["mask"], torch.bool))
    return together(pool.run(4, score_on_rank, folder, mesh, *given, 1.0, 3), mesh)["logprobs"]


def adapter_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, values: Matrices, data: dict[str, Rows]
) -> Any:
    """Metrics of an update, and what it made of the parameters."""
    engine = engine_on(rank, new_group, folder, mesh, ALL, values, trains=True)
    call = make_call(engine, rank, train_node(ROWS, ROWS, OPTIONS), ROWS, 2)
    return dict(engine.run(call, data).metrics), read_weights(engine)


@pytest.mark.slow
def test_adapters_of_keys_and_values_equal_pefts(pool: Pool, folders: Folders) -> None:
    """B of these is on several ranks, and A on all."""
    folder, mesh = folders.of("qwen2", False), MESHES["tp4"]
    values, data = matrices(folder, ALL), rollout(folder)
    model = PeftReference(folder, ALL, values)
    model.gradients(data, list(range(ROWS)))
    norm = model.update(OPTIONS["lr"])
    named = {plain(n): p.detach() for n, p in model.model.named_parameters()}
    ranks = pool.run(4, adapter_on_rank, folder, mesh, values, data)
    for name, (box, weight) in ((n, x) for _, found in ranks for n, x in found.items()):
        near(weight, named[name][tuple(slice(a, b) for a, b in box)], 1e-6 if name in values else 0.0)
    assert [told["grad_norm"][0] for told, _ in ranks if told] == [pytest.approx(norm, rel=1e-5)]
    assert_equal_copies([found for _, found in ranks])


def state_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows], strategy: Strategy
) -> Any:
    """What this rank keeps of its part of every parameter after an update."""
    options = ADAM | PPO | {"aggregate": "token_mean"}
    engine = make_engine(rank, new_group, folder, mesh, options, strategy=strategy)
    call = make_call(engine, rank, train_node(ROWS, ROWS, options), ROWS, 3, strategy=strategy)
    engine.run(call, {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()})
    assert engine.training is not None
    kept = {
        (kind, name): list(engine.training.parts(kind, name, engine.weights.box(name)))
        for kind in TRAINED
        for name in engine.weights.names()
    }
    return kept


def restored_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows], whole: dict[Any, Any],
    target: str,
) -> Any:  # fmt: skip
    """A second update from a state that others have kept, and the model as it is then, exported."""
    options = ADAM | PPO | {"aggregate": "token_mean"}
    engine = make_engine(rank, new_group, folder, mesh, options)
    read = lambda kind, name, box: whole[kind, name][tuple(slice(*span) for span in box)]  # noqa: E731
    assert engine.training is not None
    engine.training.restore(read, 1)
    engine.run(make_call(engine, rank, train_node(ROWS, ROWS, options), ROWS, 3), data)
    found = engine.weights
    write_hf(target, folder, ((name, found.read(name, found.box(name))) for name in found.names()))
    return read_weights(engine)


@pytest.mark.parametrize(
    ("variant", "layout", "strategy"),
    [("qwen2", "tp4", PLAIN), ("qwen3 one pair", "tp2dp2", Strategy(zero=1))],
    ids=lambda value: value if isinstance(value, str) else f"zero{value.zero}",
)
def test_a_state_goes_on_in_one_process_and_is_exported(
    pool: Pool, folders: Folders, tmp_path: Path, variant: str, layout: str, strategy: Strategy
) -> None:
    """As when two updates are made by one process from the start."""
    folder, data, target = folders.of(variant, False), rollout(folders.of(variant, False)), tmp_path / "after"
    shapes = {p.name: p.shape for p in parameters(read_shape(folder))}
    whole = {(k, n): torch.full(size, torch.nan) for k in TRAINED for n, size in shapes.items()}
    for kept in pool.run(4, state_on_rank, folder, MESHES[layout], data, strategy):
        for (kind, name), parts in kept.items():
            for box, values in parts:
                whole[kind, name][tuple(slice(*span) for span in box)] = values
    assert not any(values.isnan().any() for values in whole.values())
    one = Mesh.of((0,))
    pool.run(1, restored_on_rank, folder, one, data, whole, str(target))
    options = ADAM | PPO | {"aggregate": "token_mean"}
    _, named = reference(folder, data, options, 1, 2)
    exported = named_in_files(str(target), load_hf(str(target)).state_dict().items())
    for name, (_, weight) in named.items():
        torch.testing.assert_close(exported[name].double(), weight, atol=1e-5, rtol=1e-5)
