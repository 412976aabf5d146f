"""Training against plain PyTorch on the transformers model, in one process and in float64."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from hflow.graph.ir import Function
from hflow.plan.layout import Mesh
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import Rows, from_lists
from tests.engines.models import (
    ADAM,
    VARIANTS,
    Folders,
    load_hf,
    make_call,
    make_engine,
    named_in_files,
    read_training,
    reference_adamw,
    share,
    some_prompts,
    train_node,
)
from tests.engines.processes import Pool

ROWS, PAD = 14, 0
MESHES = {
    "one": Mesh.of((0,)),
    "dp2": Mesh.of((0, 1), dp=2),
    "tp2": Mesh.of((0, 1), tp=2),
    "pp2": Mesh.of((0, 1), pp=2),
    "pp2dp2": Mesh.of((0, 1, 2, 3), pp=2, dp=2),
    "tp2dp2": Mesh.of((0, 1, 2, 3), dp=2, tp=2),
    "tp2pp2": Mesh.of((0, 1, 2, 3), pp=2, tp=2),
}
PPO = {"kl_coef": 0.3, "clip": 0.05, "temperature": 0.8}


@functools.cache
def rollout(folder: str, pads: bool = False) -> dict[str, Rows]:
    """Ragged rows with masked tokens, one row without any token to learn from, one without response.

    Old and reference log-probs lie near the model's own, so that ratios and gradients are of order 1. With
    `pads` some prompts and responses hold the padding token.
    """
    generator = torch.Generator().manual_seed(5)
    prompts = some_prompts(ROWS)
    lengths = torch.randint(1, 7, (ROWS,), generator=generator)
    lengths[4] = 0
    responses = [torch.randint(3, 25, (int(n),), generator=generator).tolist() for n in lengths]
    if pads:
        prompts = [[PAD if i % 3 == 1 else token for i, token in enumerate(row)] for row in prompts]
        responses = [[PAD if i % 3 == 0 else token for i, token in enumerate(row)] for row in responses]
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) > 0.2
    start = int(lengths[:7].sum())
    mask[start : start + int(lengths[7])] = False
    rows = [torch.tensor(p + r) for p, r in zip(prompts, responses)]
    model = load_hf(folder)
    own = torch.cat(
        [response_log_probs(model, row, int(n), 0.8)[0] for row, n in zip(rows, lengths)]
    ).detach()
    near = lambda: own + 0.15 * torch.randn(total, generator=generator)  # noqa: E731
    return {
        "tokens": from_lists([row.tolist() for row in rows]),
        "mask": Rows(mask, lengths),
        "old_logprobs": Rows(near(), lengths),
        "ref_logprobs": Rows(near(), lengths),
        "advantages": Rows(torch.randn(ROWS, generator=generator)),
    }


def response_log_probs(
    model: torch.nn.Module, tokens: torch.Tensor, length: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of the last `length` tokens of one row."""
    log_p = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)[len(tokens) - length - 1 : -1]
    chosen = log_p.gather(1, tokens[len(tokens) - length :, None]).squeeze(1)
    return chosen, -(log_p.exp() * log_p).sum(-1)


class Reference:
    """PPO by the book: one row at a time, float64, torch's AdamW and gradient clipping."""

    def __init__(self, folder: str, options: dict[str, Any]):
        self.model = load_hf(folder, torch.float64)
        self.options = options
        self.adam = reference_adamw(self.model, options)

    def gradients(self, data: dict[str, Rows], rows: list[int]) -> dict[str, float]:
        """Fill ``.grad`` for the minibatch `rows`; its loss, sums over its tokens, and their number."""
        self.adam.zero_grad()
        trained = sum(int(data["mask"].slice(r, r + 1).values.sum()) for r in rows)
        counted = sum(bool(data["mask"].slice(r, r + 1).values.any()) for r in rows)
        total = torch.zeros((), dtype=torch.float64)
        sums = {"kl": 0.0, "clip_fraction": 0.0, "apart": 0.0}
        for row in rows:
            loss, kl, clipped, apart = self.row(data, row)
            tokens = len(loss)
            if not tokens:
                continue
            weight = {
                "token_mean": 1 / trained,
                "sequence_mean": 1 / (tokens * counted),
                "sequence_sum": 1 / counted,
            }[self.options["aggregate"]]
            total = total + loss.sum() * weight
            sums["kl"] += float(kl.detach().sum())
            sums["clip_fraction"] += float(clipped.sum())
            sums["apart"] += float(apart.sum())
        total.backward()
        return {"loss": total.item(), "tokens": trained, **sums}

    def row(self, data: dict[str, Rows], row: int) -> tuple[torch.Tensor, ...]:
        """Loss, kl, clipped and |new - old| of the tokens of one row that are learnt from."""
        o, part = self.options, {name: rows.slice(row, row + 1) for name, rows in data.items()}
        tokens, mask = part["tokens"].values.long(), part["mask"].values
        new = response_log_probs(self.model, tokens, len(mask), o["temperature"])[0][mask]
        old, ref = part["old_logprobs"].values[mask].double(), part["ref_logprobs"].values[mask].double()
        advantage, ratio = part["advantages"].values.double(), (new - old).exp()
        clamped = ratio.clamp(1 - o["clip"], 1 + o["clip"])
        kl = (ref - new).exp() - (ref - new) - 1
        loss = torch.maximum(-ratio * advantage, -clamped * advantage) + o["kl_coef"] * kl
        return loss, kl, (clamped * advantage < ratio * advantage).double(), (new - old).abs().detach()

    def update(self, lr: float) -> float:
        limit = self.options["clip_grad"] or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        return norm


def reference(folder: str, data: dict[str, Rows], options: dict[str, Any], updates: int, epochs: int) -> Any:
    """Metrics, last gradients and final weights of one execution at step 3."""
    model = Reference(folder, options)
    metrics: dict[str, float] = {}
    mismatch = 0.0
    for i in range(epochs * updates):
        number = 3 * epochs * updates + i
        lr = options["lr"] * min(1.0, (number + 1) / max(1, options["warmup_steps"]))
        rows = [r for r in range(ROWS) if r % updates == i % updates]
        found = model.gradients(data, rows) | {"grad_norm": model.update(lr), "lr": lr}
        apart = found.pop("apart")
        mismatch = apart / found["tokens"] if i == 0 else mismatch
        metrics = {name: metrics.get(name, 0.0) + value for name, value in found.items()}
    state = dict(model.model.named_parameters())
    gradients = named_in_files(folder, ((n, p.grad) for n, p in state.items()))
    weights = named_in_files(folder, ((n, p.detach()) for n, p in state.items()))
    named = {n: (gradients[n], weight) for n, weight in weights.items()}
    tokens = metrics.pop("tokens")
    counts = {"kl": tokens, "clip_fraction": tokens}
    means = {n: v / counts.get(n, epochs * updates) for n, v in metrics.items()}
    return means | {"mismatch": mismatch, "skipped_updates": 0.0}, named


def train_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    data: dict[str, Rows],
    options: dict[str, Any],
    minibatch: int,
    epochs: int,
    micro_batch: int,
) -> Any:
    """Metrics, and (box, last gradient, weight) by HF name."""
    engine = make_engine(rank, new_group, folder, mesh, ADAM | options)
    node = train_node(ROWS, minibatch, options, epochs=epochs)
    call = make_call(engine, rank, node, ROWS, micro_batch)
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    metrics = engine.run(call, inputs).metrics
    return dict(metrics), read_training(engine)


def compare(results: list[Any], metrics: dict[str, float], named: dict[str, Any], atol: float) -> None:
    for _, found in results:
        for name, (box, gradient, weight) in found.items():
            where = tuple(slice(a, b) for a, b in box)
            for mine, theirs in zip((gradient, weight), named[name]):
                torch.testing.assert_close(
                    torch.from_numpy(mine).double(), theirs[where], atol=atol, rtol=1e-5
                )
    sums: dict[str, list[float]] = {}
    for reported, _ in results:
        for name, pair in reported.items():
            sums.setdefault(name, [0.0, 0.0])
            sums[name] = [a + b for a, b in zip(sums[name], pair)]
    assert sums.keys() == metrics.keys()
    for name, (total, weight) in sums.items():
        assert total / weight == pytest.approx(metrics[name], rel=2e-5, abs=1e-7), name


@pytest.mark.matrix(24)
@pytest.mark.parametrize("layout,micro_batch", [
    ("one", 14), ("one", 4), ("one", 1), ("dp2", 3), ("tp2", 5), ("pp2", 2), ("pp2", 14), ("pp2dp2", 3),
    ("tp2dp2", 14), ("tp2pp2", 4),
])  # fmt: skip
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_plain_pytorch(
    pool: Pool, folders: Folders, layout: str, micro_batch: int, tied: bool, variant: str
) -> None:
    folder, mesh = folders.of(variant, tied), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    metrics, named = reference(folder, rollout(folder), options, 1, 1)
    results = pool.run(
        len(mesh.devices), train_on_rank, folder, mesh, rollout(folder), options, ROWS, 1, micro_batch
    )
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare(results, metrics, named, atol=1e-6)
    assert max(float(g.abs().max()) for g, _ in named.values()) > 0.1
    assert 0.1 < metrics["clip_fraction"] < 0.9


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_row_of_the_embedding_learns_as_in_transformers(
    pool: Pool, folders: Folders, layout: str, tied: bool
) -> None:
    """Not as an input; as an output it does, also where both are one matrix."""
    folder, mesh = folders.of("llama", tied), MESHES[layout]
    data, options = rollout(folder, pads=True), ADAM | PPO | {"aggregate": "token_mean"}
    assert (data["tokens"].values == PAD).sum() > 20
    metrics, named = reference(folder, data, options, 1, 1)
    arguments = folder, mesh, data, options, ROWS, 1, 5
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare(pool.run(len(mesh.devices), train_on_rank, *arguments), metrics, named, atol=1e-6)
    embedding = named["model.embed_tokens.weight"][0]
    assert bool(embedding[PAD].any()) == tied and embedding.any()


@pytest.mark.matrix
@pytest.mark.parametrize("layout,micro_batch", [("one", 14), ("dp2", 2), ("tp2pp2", 3)])
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_sum"])
def test_several_updates_equal_torch_adamw(
    pool: Pool, folders: Folders, layout: str, micro_batch: int, aggregate: str
) -> None:
    """Minibatches of global rows, epochs, warm-up, clipping and weight decay."""
    folder, mesh = folders.of("llama", False), MESHES[layout]
    options = ADAM | PPO | {"aggregate": aggregate, "clip_grad": 0.7, "warmup_steps": 20, "weight_decay": 0.5}
    metrics, named = reference(folder, rollout(folder), options, 2, 2)
    results = pool.run(
        len(mesh.devices), train_on_rank, folder, mesh, rollout(folder), options, ROWS // 2, 2, micro_batch
    )
    # Adam divides by the root of a running mean: rounding of small gradients grows over four updates
    compare(results, metrics, named, atol=1e-5)
    assert metrics["grad_norm"] > 0.7
    assert metrics["lr"] == pytest.approx(options["lr"] * (13 + 14 + 15 + 16) / 80)


LOSSES = """
import torch

def infinite(logprobs, mask):
    return logprobs / 0

def after_padding(logprobs, entropy, mask):
    return -torch.where(mask, logprobs, torch.full_like(logprobs, float("nan"))) - 0.1 * entropy

def scalar(logprobs, mask):
    return -logprobs[mask].mean(), logprobs.detach()

def per_row(logprobs, mask):
    return -logprobs.sum(1, keepdim=True), logprobs.detach()

def narrow_metric(logprobs, mask):
    return -logprobs, logprobs.detach().mean()

def number(logprobs, mask):
    return -logprobs, 1.0

def detached(logprobs, mask):
    return -logprobs.detach(), logprobs.detach()

def lone(logprobs, mask):
    return -logprobs
"""
TOKENS = "logprobs: f32[rows, resp~]<trained>, mask: bool[rows, resp~]"


def user_loss_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows], function: Function
) -> Any:
    engine = make_engine(rank, new_group, folder, mesh, ADAM)
    call = make_call(engine, rank, train_node(ROWS, ROWS, {}, function), ROWS, 2)
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    before = [p.detach().clone() for p in engine.model.parameters()]
    try:
        return dict(engine.run(call, inputs).metrics)
    except NodeError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))
        return error.code, error.node, error.message


def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(
    pool: Pool, folders: Folders, tmp_path: Path
) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    folder = folders.of("llama", False)
    function = Function(f"{tmp_path}/losses.py:infinite", f"{TOKENS} -> loss: f32[rows, resp~]")
    results = pool.run(4, user_loss_on_rank, folder, MESHES["pp2dp2"], rollout(folder), function)
    for code, node, message in results:
        assert (code, node) == ("HF405", "actor_train")
        assert "inf" in message


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("scalar", "returned `loss` of shape [], declared is f32[rows, resp~], here [2, 6]"),
        ("per_row", "returned `loss` of shape [2, 1], declared is f32[rows, resp~], here [2, 6]"),
        ("narrow_metric", "returned `seen` of shape [], declared is f32[rows, resp~], here [2, 6]"),
        ("number", "returned `seen` as float, declared is f32[rows, resp~]"),
        ("detached", "returned a `loss` without gradient"),
        ("lone", "returned 1 values, declared are loss, seen"),
    ],
)
def test_a_loss_that_breaks_its_signature_is_named_and_not_broadcast(
    pool: Pool, folders: Folders, tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    folder, reference = folders.of("llama", False), f"{tmp_path}/losses.py:{name}"
    function = Function(reference, f"{TOKENS} -> loss: f32[rows, resp~], seen: f32[rows, resp~]")
    (failure,) = pool.run(1, user_loss_on_rank, folder, MESHES["one"], rollout(folder), function)
    code, node, message = failure
    assert (code, node) == ("HF401", "actor_train")
    assert message.startswith(f"`{reference}` {problem}")


def test_a_loss_is_given_what_its_declared_signature_names(
    pool: Pool, folders: Folders, tmp_path: Path
) -> None:
    """A wrapped function takes ``**inputs``: its Python parameters do not say what it reads."""
    wrapped = "def wrapped(**inputs):\n    assert set(inputs) == {'logprobs', 'mask'}\n"
    (tmp_path / "wrapped.py").write_text(wrapped + "    return -inputs['logprobs']\n")
    folder = folders.of("llama", False)
    function = Function(f"{tmp_path}/wrapped.py:wrapped", f"{TOKENS} -> loss: f32[rows, resp~]")
    (metrics,) = pool.run(1, user_loss_on_rank, folder, MESHES["one"], rollout(folder), function)
    assert metrics["loss"][0] > 0


def test_a_loss_may_use_entropy_and_ignore_padding(pool: Pool, folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    folder = folders.of("llama", False)
    signature = f"{TOKENS}, entropy: f32[rows, resp~]<trained> -> loss: f32[rows, resp~]"
    function = Function(f"{tmp_path}/losses.py:after_padding", signature, {}, ("logprobs", "entropy"))
    (metrics,) = pool.run(1, user_loss_on_rank, folder, MESHES["one"], rollout(folder), function)
    data, model = rollout(folder), load_hf(folder, torch.float64)
    values = []
    for row in range(ROWS):
        tokens, mask = (
            data["tokens"].slice(row, row + 1).values.long(),
            data["mask"].slice(row, row + 1).values,
        )
        chosen, entropy = response_log_probs(model, tokens, len(mask), 1.0)
        values.append((-chosen - 0.1 * entropy)[mask])
    assert metrics["loss"][0] == pytest.approx(torch.cat(values).mean().item(), rel=1e-6)


def bf16_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows]) -> Any:
    """Weights after writing new ones and a step with (almost) no learning rate."""
    options = ADAM | {"lr": 1e-12, "weight_decay": 0.0}
    engine = make_engine(rank, new_group, folder, mesh, options, dtype="bf16")
    weights = engine.weights
    for name in weights.names():
        weights.write(name, weights.box(name), weights.read(name, weights.box(name)) * 2)
    call = make_call(engine, rank, train_node(ROWS, ROWS, options), ROWS, 2)
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    metrics = dict(engine.run(call, inputs).metrics)
    return metrics, {n: weights.read(n, weights.box(n)).float().numpy() for n in weights.names()}


def test_bf16_trains_from_the_weights_written_last(pool: Pool, folders: Folders) -> None:
    folder = folders.of("qwen2", False)
    ((metrics, found),) = pool.run(1, bf16_on_rank, folder, MESHES["one"], rollout(folder))
    assert 0 < metrics["grad_norm"][0] < 1e3
    for name, tensor in load_hf(folder).state_dict().items():
        expected = tensor.bfloat16() * 2
        assert torch.equal(torch.from_numpy(found[name]), expected.float()), name
