"""Schedules, frozen parameters and averages in training, against plain PyTorch on the transformers model."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from hflow.graph.ir import Model, Refresh
from hflow.plan.layout import Mesh
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.rows import Rows
from tests.engines.models import (
    ADAM,
    Folders,
    load_hf,
    make_call,
    make_engine,
    read_weights,
    share,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, PPO, ROWS, Reference, rollout

STEPS, MINIBATCHES, WARMUP = 3, 2, 2
ZERO1 = Strategy(zero=1)
OPTIONS = ADAM | PPO | {
    "betas": (0.8, 0.97), "eps": 1e-3, "weight_decay": 0.3, "clip_grad": 0.5, "warmup_steps": WARMUP,
    "schedule": "cosine", "min_lr": 1e-3, "aggregate": "token_mean",
}  # fmt: skip


def reference(
    folder: str, data: dict[str, Rows], options: dict[str, Any], frozen: tuple[str, ...] = ()
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Weights, gradient norms and rates of a run: torch's AdamW and clipping, transformers' schedule."""
    model = Reference(folder, options)
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, f"model.{pattern}") for pattern in frozen))
    total = STEPS * MINIBATCHES
    scheduler = get_scheduler(
        "cosine_with_min_lr", model.adam, WARMUP, total,
        scheduler_specific_kwargs={"min_lr": options["min_lr"]},
    )  # fmt: skip
    norms: list[float] = []
    rates: list[float] = []
    for update in range(total):
        model.gradients(data, [r for r in range(ROWS) if r % MINIBATCHES == update % MINIBATCHES])
        rates.append(float(scheduler.get_last_lr()[0]))
        norms.append(model.update(rates[-1]))
        scheduler.step()
    return {name: p.detach() for name, p in model.model.named_parameters()}, norms, rates


def train_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    data: dict[str, Rows],
    options: dict[str, Any],
    frozen: tuple[str, ...],
    strategy: Strategy,
    dtype: str,
) -> Any:
    """Weights before and after, metrics of every step, and of every parameter what is kept to train it."""
    engine = make_engine(rank, new_group, folder, mesh, options, dtype, strategy=strategy, freeze=frozen)
    before = read_weights(engine)
    node = train_node(ROWS, ROWS // MINIBATCHES, options)
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    metrics: list[Any] = []
    for step in range(STEPS):
        call = make_call(engine, rank, node, ROWS, 2, step=step, strategy=strategy)
        metrics.append(dict(engine.run(replace(call, steps=STEPS), inputs).metrics))
    assert engine.adam and engine.training and engine.training.updates == STEPS * MINIBATCHES
    kept = {
        name: [sum(len(values.view(-1)) for _, values in engine.training.parts(kind, name, box))
               for kind in ("weights", "exp_avg", "exp_avg_sq")]
        for name, (box, _) in before.items()
    }  # fmt: skip
    state = sum(t.numel() for t in engine.adam.state()) + sum(t.numel() for t in engine.adam._gradients())
    return before, read_weights(engine), metrics, kept, state


def compare(results: list[Any], expected: dict[str, torch.Tensor], atol: float) -> None:
    for _, after, *_ in results:
        for name, (box, weight) in after.items():
            where = tuple(slice(a, b) for a, b in box)
            torch.testing.assert_close(
                torch.from_numpy(weight).double(), expected[name][where], atol=atol, rtol=1e-5
            )


def means(results: list[Any], name: str) -> list[float]:
    """A metric of every step."""
    steps = zip(*(metrics for _, _, metrics, *_ in results))
    pairs = ([m[name] for m in step if name in m] for step in steps)
    return [sum(total for total, _ in found) / sum(weight for _, weight in found) for found in pairs]


@pytest.mark.parametrize("layout,strategy", [("one", PLAIN), ("dp2", ZERO1)])
def test_a_scheduled_run_equals_torch_and_transformers(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy
) -> None:
    """Betas, eps, decay of matrices alone, clipping, and a cosine with warm-up and a least rate."""
    folder, mesh = folders.of("qwen2", False), MESHES[layout]
    data = rollout(folder)
    expected, norms, rates = reference(folder, data, OPTIONS)
    arguments = folder, mesh, data, OPTIONS, (), strategy, "f32"
    results = pool.run(len(mesh.devices), train_on_rank, *arguments)
    # float32 against float64, over updates of up to 1e-2: rounding of gradients, divided by their size + 1e-3
    compare(results, expected, atol=2e-6)
    by_step = lambda values: [sum(values[i : i + 2]) / 2 for i in range(0, len(values), 2)]  # noqa: E731
    assert means(results, "lr") == pytest.approx(by_step(rates), rel=1e-9)
    assert means(results, "grad_norm") == pytest.approx(by_step(norms), rel=1e-4)
    assert min(norms) > OPTIONS["clip_grad"] and rates[0] == 0 < rates[-1] < rates[WARMUP] == OPTIONS["lr"]


FROZEN = {
    "embedding and layers": ("embed_tokens*", "layers.0.*", "layers.1.*"),
    "last layers": ("layers.2.*", "layers.3.*", "norm*"),
    "matrices of one kind": ("layers.?.self_attn.[qkv]_proj.*", "*layernorm.weight"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", FROZEN)
@pytest.mark.parametrize("layout,strategy,tied", [
    ("one", PLAIN, False), ("dp2", ZERO1, False), ("tp2pp2", PLAIN, False), ("pp2dp2", ZERO1, True),
])  # fmt: skip
def test_frozen_parameters_stay_to_the_bit(
    pool: Pool, folders: Folders, case: str, layout: str, strategy: Strategy, tied: bool
) -> None:
    """A whole stage of a pipeline may be frozen. The others learn as if in torch, with their norm alone."""
    folder, mesh, frozen = folders.of("qwen2", tied), MESHES[layout], FROZEN[case]
    data = rollout(folder)
    expected, norms, _ = reference(folder, data, OPTIONS, frozen)
    arguments = folder, mesh, data, OPTIONS, frozen, strategy, "f32"
    results = pool.run(len(mesh.devices), train_on_rank, *arguments)
    compare(results, expected, atol=2e-6)
    assert means(results, "grad_norm") == pytest.approx(
        [sum(norms[i : i + 2]) / 2 for i in (0, 2, 4)], rel=1e-4
    )
    for before, after, _, kept, _ in results:
        for name, (_, values) in before.items():
            is_frozen = any(fnmatch(name, f"model.{pattern}") for pattern in frozen)
            assert ((after[name][1] == values).all()) == is_frozen, name
            if is_frozen:
                assert kept[name] == [values.size, 0, 0], name


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_nothing_is_held_for_frozen_parameters(pool: Pool, folders: Folders, dtype: str) -> None:
    """Moments, float32 copies of bf16 weights, and gradients: by as many elements less as are frozen."""
    folder, mesh, frozen = folders.of("llama", False), MESHES["one"], FROZEN["embedding and layers"]
    model = load_hf(folder)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    trained = sum(
        size for name, size in sizes.items() if not any(fnmatch(name, f"model.{f}") for f in frozen)
    )
    copies = 3 if dtype == "f32" else 4
    for patterns, elements in ((frozen, trained), ((), sum(sizes.values()))):
        arguments = folder, mesh, rollout(folder), OPTIONS, patterns, PLAIN, dtype
        ((*_, state),) = pool.run(1, train_on_rank, *arguments)
        # Megatron pads its buffer of gradients
        assert copies * elements <= state <= copies * elements + 1024
    assert trained < 0.7 * sum(sizes.values())


def losses_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows], micro_batch: int
) -> Any:
    options = OPTIONS | {"schedule": "constant", "warmup_steps": 0, "clip_grad": 0.0}
    engine = make_engine(rank, new_group, folder, mesh, options)
    node = train_node(ROWS, ROWS, options)
    call = make_call(engine, rank, node, ROWS, micro_batch)
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    found = engine.run(replace(call, steps=STEPS), inputs).metrics
    return found["loss"][0], found["grad_norm"][0], read_weights(engine)


def test_the_loss_of_an_update_is_the_same_however_it_is_split(pool: Pool, folders: Folders) -> None:
    """A mean over the tokens of all rows, which are of different lengths: not one of means over parts."""
    folder, mesh = folders.of("llama", False), MESHES["one"]
    found = [pool.run(1, losses_on_rank, folder, mesh, rollout(folder), size)[0] for size in (ROWS, 5, 2, 1)]
    (loss, norm, weights), *others = found
    for other_loss, other_norm, other_weights in others:
        # sums of float32 numbers in another order
        assert other_loss == pytest.approx(loss, rel=1e-5) and other_norm == pytest.approx(norm, rel=1e-5)
        for name, (_, values) in weights.items():
            assert abs(other_weights[name][1] - values).max() < 1e-6, name


DECAY = 0.9


def average_on_rank(
    rank: int, new_group: NewGroup, folder: str, other: str, mesh: Mesh, data: dict[str, Rows], dtype: Any
) -> Any:
    """The average after each step, and the weights that came into it."""
    ref = Model("ref", other, frozen=True, dtype=dtype, refresh=Refresh("actor", 1, DECAY))
    options = OPTIONS | {"warmup_steps": 0}
    engine = make_engine(rank, new_group, folder, mesh, options, dtype, averaging=(ref,))
    (average,), node = engine.averages.values(), train_node(ROWS, ROWS, options)
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    read = lambda: {n: average.view(n, average.box(n)).clone().reshape(-1) for n in average.names()}  # noqa: E731
    found: list[tuple[dict[str, torch.Tensor], Any]] = [(read(), None)]
    for step in range(STEPS):
        engine.run(replace(make_call(engine, rank, node, ROWS, 2, step=step), steps=STEPS), inputs)
        average.advance(step)
        average.advance(step)  # another reader asks in the same step
        own = {name: values.reshape(-1) for name, (_, values) in read_weights(engine).items()}
        found.append((read(), own))
    assert all(values.dtype == torch.float32 for values in found[-1][0].values())
    return [({n: v.numpy() for n, v in averages.items()}, own) for averages, own in found]


@pytest.mark.parametrize("layout,dtype", [("one", "f32"), ("tp2pp2", "f32"), ("one", "bf16")])
def test_an_average_follows_the_closed_recursion(
    pool: Pool, folders: Folders, layout: str, dtype: str
) -> None:
    """decay^t a_0 + (1 - decay) sum_s decay^(t - s) w_s, from the weights of the model that takes it over."""
    folder, other, mesh = folders.of("qwen2", False), folders.of("qwen2", False), MESHES[layout]
    for states in pool.run(len(mesh.devices), average_on_rank, folder, other, mesh, rollout(folder), dtype):
        first, weights = states[0][0], [own for _, own in states[1:]]
        for time, (averages, _) in enumerate(states):
            for name, values in averages.items():
                expected = DECAY**time * first[name].astype("float64")
                for step, own in enumerate(weights[:time], 1):
                    expected += (1 - DECAY) * DECAY ** (time - step) * own[name].astype("float64")
                assert abs(values - expected).max() < 1e-6, name  # float32
        moved = max(float(abs(states[-1][0][name] - values).max()) for name, values in first.items())
        assert moved > 1e-3
