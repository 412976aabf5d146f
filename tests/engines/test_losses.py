"""Losses per token of a critic, per row and per group, against plain PyTorch in float64, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hflow.graph.ir import Function, Head
from hflow.plan.layout import Mesh
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import Rows, from_lists
from tests.engines.models import (
    ADAM,
    Folders,
    load_hf,
    make_call,
    make_engine,
    read_training,
    reference_adamw,
    some_prompts,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, compare, response_log_probs

ROWS, GROUP = 18, 3

LOSSES = """
import torch
from torch.nn.functional import logsigmoid

def critic(values, old_values, returns, mask, *, clip=0.2):
    near = old_values + (values - old_values).clamp(-clip, clip)
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    is_far = (values - old_values).abs() > clip
    return torch.maximum(plain, clipped) / 2, (is_far & (clipped > plain)).float()

def sequence_ratio(logprobs, old_logprobs, advantages, mask):
    assert advantages.dim() == 1
    count = mask.sum(1).clamp(min=1)
    ratio = ((logprobs - old_logprobs).masked_fill(~mask, 0).sum(1) / count).exp()
    padding_is_nan = 0 / advantages
    return padding_is_nan - ratio * advantages, ratio, logprobs - old_logprobs

def preference(logprobs, ref_logprobs, mask, score, *, beta=0.5):
    assert logprobs.shape[:2] == score.shape and score.shape[1] == 3
    rewards = beta * (logprobs - ref_logprobs).masked_fill(~mask, 0).sum(2)
    best, worst = score.argmax(1, keepdim=True), score.argmin(1, keepdim=True)
    margin = (rewards.gather(1, best) - rewards.gather(1, worst)).squeeze(1)
    return -logsigmoid(margin), margin, rewards, logprobs - ref_logprobs

def broken(logprobs, mask):
    raise ZeroDivisionError("no loss")

def curious(logprobs, mask, entropy, *, entropy_coef=0.0):
    assert (entropy is None) == (entropy_coef == 0)
    bonus = 0 if entropy is None else entropy_coef * entropy
    return -logprobs - bonus

def flat(logprobs, mask):
    return logprobs.sum((1, 2)).repeat(2)

def per_token(logprobs, mask):
    return -logprobs.flatten(0, 1)
"""
SIGNATURES = {
    "critic": "values: f32[rows, resp~]<trained>, old_values: f32[rows, resp~]<value>, "
    "returns: f32[rows, resp~?], mask: bool[rows, resp~] "
    "-> loss: f32[rows, resp~], clipped: f32[rows, resp~]",
    "sequence_ratio": "logprobs: f32[rows, resp~]<trained>, old_logprobs: f32[rows, resp~]<old>, "
    "advantages: f32[rows], mask: bool[rows, resp~] "
    "-> loss: f32[rows], ratio: f32[rows], drift: f32[rows, resp~]",
    "preference": "logprobs: f32[pairs*k, resp~]<trained>, ref_logprobs: f32[pairs*k, resp~]<scored>, "
    "mask: bool[pairs*k, resp~], score: f32[pairs*k] "
    "-> loss: f32[pairs], margin: f32[pairs], reward: f32[pairs*k], drift: f32[pairs*k, resp~]",
}


def batch() -> dict[str, Rows]:
    """Ragged rows with masked tokens; one without response, one without any token to learn from."""
    generator = torch.Generator().manual_seed(8)
    prompts = some_prompts(ROWS)
    lengths = torch.randint(1, 7, (ROWS,), generator=generator)
    lengths[5] = 0
    responses = [torch.randint(3, 25, (int(n),), generator=generator).tolist() for n in lengths]
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) > 0.2
    start = int(lengths[:7].sum())
    mask[start : start + int(lengths[7])] = False
    tokens = lambda scale, shift: Rows(  # noqa: E731
        torch.randn(total, generator=generator) * scale + shift, lengths
    )
    rows = lambda: Rows(torch.randn(ROWS, generator=generator))  # noqa: E731
    return {
        "tokens": from_lists([p + r for p, r in zip(prompts, responses)]),
        "mask": Rows(mask, lengths),
        "old_logprobs": tokens(0.5, -4.0),
        "ref_logprobs": tokens(0.5, -4.0),
        "old_values": tokens(0.5, 0.0),
        "returns": tokens(1.0, 0.0),
        "advantages": rows(),
        "score": rows(),
    }


@dataclass(frozen=True)
class Row:
    """One row in float64: the trained model's log-probs or values, and the data, of tokens that count."""

    trained: torch.Tensor
    data: dict[str, torch.Tensor]


Losses = Callable[[list[Row], dict[str, float]], tuple[torch.Tensor, dict[str, list[torch.Tensor]]]]


def critic_loss(
    rows: list[Row], counts: dict[str, float]
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    losses, held = [], []
    for row in rows:
        for value, old, target in zip(row.trained, row.data["old_values"], row.data["returns"]):
            near = old + torch.sign(value.detach() - old) * 0.2
            is_far = bool((value - old).abs() > 0.2)
            is_held = is_far and bool((near - target).abs() > (value - target).abs())
            losses.append(((near if is_held else value) - target) ** 2 / 2)
            held.append(torch.tensor(float(is_held)))
    return torch.stack(losses).sum() / counts["tokens"], {"clipped": held}


def ratio_loss(
    rows: list[Row], counts: dict[str, float]
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    total, ratios, drifts = torch.zeros((), dtype=torch.float64), [], []
    for row in rows:
        drift = row.trained - row.data["old_logprobs"]
        if not len(drift):
            continue
        ratio = drift.mean().exp()
        total = total - ratio * row.data["advantages"] / counts["rows"]
        ratios.append(ratio.detach())
        drifts += list(drift.detach())
    return total, {"ratio": ratios, "drift": drifts}


def preference_loss(
    rows: list[Row], counts: dict[str, float]
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    total, metrics = torch.zeros((), dtype=torch.float64), {"margin": [], "reward": [], "drift": []}
    for first in range(0, len(rows), GROUP):
        group = rows[first : first + GROUP]
        drifts = [row.trained - row.data["ref_logprobs"] for row in group]
        scores = [float(row.data["score"]) for row in group]
        rewards = [0.5 * drift.sum() for drift in drifts]
        margin = rewards[scores.index(max(scores))] - rewards[scores.index(min(scores))]
        total = total + (1 + (-margin).exp()).log() / (len(rows) / GROUP)
        metrics["margin"].append(margin.detach())
        metrics["reward"] += [r.detach() for r, drift in zip(rewards, drifts) if len(drift)]
        metrics["drift"] += [d.detach() for drift in drifts for d in drift]
    return total, metrics


@dataclass(frozen=True)
class Case:
    head: Head
    unit: int
    loss: Losses


CASES = {
    "critic": Case("scalar", 1, critic_loss),
    "sequence_ratio": Case("lm", 1, ratio_loss),
    "preference": Case("lm", GROUP, preference_loss),
}


def reference_row(model: Any, head: Head, data: dict[str, Rows], number: int) -> Row:
    part = {name: rows.slice(number, number + 1).values for name, rows in data.items()}
    tokens, mask = part["tokens"].long(), part["mask"]
    if head == "scalar":
        hidden = model.model(tokens[None]).last_hidden_state[0]
        trained = (hidden @ model.score.weight.T).squeeze(1)[len(tokens) - len(mask) - 1 : -1]
    else:
        trained = response_log_probs(model, tokens, len(mask), 1.0)[0]
    given = {n: v.double() if len(v) == 1 and data[n].lengths is None else v[mask].double()
             for n, v in part.items() if n not in ("tokens", "mask")}  # fmt: skip
    return Row(trained[mask], {n: v.squeeze(0) if data[n].lengths is None else v for n, v in given.items()})


def reference(folder: str, case: Case, data: dict[str, Rows], options: dict[str, Any], updates: int) -> Any:
    """Metrics, last gradients and final weights of one execution, by torch's AdamW."""
    model = load_hf(folder, torch.float64, case.head)
    adam = reference_adamw(model, options)
    sums: dict[str, list[float]] = {}
    for update in range(updates):
        adam.zero_grad()
        numbers = [r for r in range(ROWS) if r // case.unit % updates == update]
        rows = [reference_row(model, case.head, data, r) for r in numbers]
        tokens, counted = sum(len(row.trained) for row in rows), sum(bool(len(row.trained)) for row in rows)
        loss, metrics = case.loss(rows, {"tokens": float(tokens), "rows": float(counted)})
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip_grad"] or float("inf"))
        adam.step()
        plain = {"loss": [loss.detach()], "grad_norm": [norm], "lr": [torch.tensor(options["lr"])]}
        plain["skipped_updates"] = [torch.tensor(0.0)]
        if case.loss is ratio_loss and update == 0:  # the only one that reads `old_logprobs`
            metrics["mismatch"] = [drift.abs() for drift in metrics["drift"]]
        for name, values in (metrics | plain).items():
            sums.setdefault(name, []).extend(map(float, values))
    named = {name: (p.grad, p.detach()) for name, p in model.named_parameters()}
    return {name: sum(values) / len(values) for name, values in sums.items()}, named


def train_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    case: tuple[Head, int],
    mesh: Mesh,
    data: dict[str, Rows],
    function: Function,
    options: dict[str, Any],
    minibatch: int,
    micro_batch: int,
    dtype: str = "f32",
) -> Any:
    head, unit = case
    engine = make_engine(rank, new_group, folder, mesh, ADAM, dtype, head)
    node = train_node(ROWS, minibatch, options, function, group=unit)
    call = make_call(engine, rank, node, ROWS, micro_batch, unit=unit)
    start, stop = call.first_row, call.first_row + call.num_rows
    try:
        result = engine.run(call, {name: rows.slice(start, stop) for name, rows in data.items()})
    except NodeError as error:
        return error.message
    return dict(result.metrics), None if dtype == "bf16" else read_training(engine)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("losses") / "mine.py"
    file.write_text(LOSSES)
    return file


LAYOUTS = [("one", 18), ("one", 4), ("dp2", 5), ("tp2", 7), ("pp2", 5), ("pp2dp2", 3), ("tp2pp2", 4)]


@pytest.mark.matrix
@pytest.mark.parametrize("layout,micro_batch", LAYOUTS)
@pytest.mark.parametrize("name", list(CASES))
def test_gradients_and_updates_equal_plain_pytorch(
    pool: Pool, folders: Folders, losses: Path, name: str, layout: str, micro_batch: int
) -> None:
    """Two updates of three groups each, so that a data-parallel rank may have none of a minibatch's."""
    case, mesh, data = CASES[name], MESHES[layout], batch()
    folder = folders.of("qwen2", False, case.head)
    options = ADAM | {"clip_grad": 0.7}
    metrics, named = reference(folder, case, data, options, 2)
    function = Function(f"{losses}:{name}", SIGNATURES[name], {})
    results = pool.run(
        len(mesh.devices), train_on_rank, folder, (case.head, case.unit), mesh, data, function, options,
        ROWS // 2, micro_batch,
    )  # fmt: skip
    assert not any(isinstance(found, str) for found in results), results
    # float32 gradients of size up to about 10 before clipping; rounding grows over two updates
    compare(results, metrics, named, atol=2e-6)
    assert metrics["grad_norm"] > 0.7
    assert max(float(g.abs().max()) for g, _ in named.values()) > 0.01


def test_a_critic_in_bf16_learns_on_two_stages(pool: Pool, folders: Folders, losses: Path) -> None:
    """Its values are float32 numbers of bf16 hidden states."""
    folder, function = (
        folders.of("qwen2", False, "scalar"),
        Function(f"{losses}:critic", SIGNATURES["critic"], {}),
    )
    metrics, _ = reference(folder, CASES["critic"], batch(), ADAM, 2)
    arguments = (folder, ("scalar", 1), MESHES["pp2"], batch(), function, ADAM, ROWS // 2, 5, "bf16")
    (first, _), (last, _) = pool.run(2, train_on_rank, *arguments)
    assert not first
    for name in ("loss", "grad_norm"):  # bf16 has 8 significant bits
        assert last[name][0] / last[name][1] == pytest.approx(metrics[name], rel=0.03)


def test_an_optional_trained_input_is_computed_where_its_coefficient_is_not_zero(
    pool: Pool, folders: Folders, losses: Path
) -> None:
    folder, data = folders.of("llama", False), batch()
    signature = (
        "logprobs: f32[rows, resp~]<trained>, mask: bool[rows, resp~], "
        "entropy?: f32[rows, resp~]<trained> -> loss: f32[rows, resp~]"
    )
    function = Function(f"{losses}:curious", signature, {"entropy_coef": 0.0}, ("logprobs", "entropy"))
    found = []
    for coefficient in (0.0, 0.5):
        options = ADAM | {"entropy_coef": coefficient}
        ((metrics, _),) = pool.run(
            1, train_on_rank, folder, ("lm", 1), MESHES["one"], data, function, options, ROWS, 7
        )
        found.append(metrics["loss"][0])
    model, bonus = load_hf(folder, torch.float64), []
    for row in range(ROWS):
        part = {n: data[n].slice(row, row + 1).values for n in ("tokens", "mask")}
        entropy = response_log_probs(model, part["tokens"].long(), len(part["mask"]), 1.0)[1]
        bonus.append(entropy[part["mask"]].detach())
    assert found[0] - found[1] == pytest.approx(0.5 * torch.cat(bonus).mean().item(), rel=1e-5)


GROUPED = "logprobs: f32[pairs*k, resp~]<trained>, mask: bool[pairs*k, resp~]"


@pytest.mark.parametrize(
    ("name", "output", "micro_batch", "problem"),
    [
        ("flat", "f32[pairs]", 6, "returned `loss` of shape [4], declared is f32[pairs], here [2]"),
        ("per_token", "f32[pairs*k, resp~]", 6, "declared is f32[pairs*k, resp~], here [2, 3, 6]"),
        ("flat", "f32[pairs*k]", 6, "declared is f32[pairs*k], here [2, 3]"),
        ("broken", "f32[pairs]", 6, "mine.py:{line}: ZeroDivisionError: no loss"),
        ("flat", "f32[pairs]", 2, "a micro-batch of 2 rows is too small for a group of 3"),
    ],
)
def test_a_grouped_loss_that_breaks_its_signature_is_named(
    pool: Pool, folders: Folders, losses: Path, name: str, output: str, micro_batch: int, problem: str
) -> None:
    folder = folders.of("llama", False)
    function = Function(f"{losses}:{name}", f"{GROUPED} -> loss: {output}")
    arguments = (folder, ("lm", GROUP), MESHES["one"], batch(), function, ADAM, ROWS, micro_batch)
    (message,) = pool.run(1, train_on_rank, *arguments)
    lines = LOSSES.splitlines()
    line = next((i for i, text in enumerate(lines, 1) if "no loss" in text), 0)
    assert problem.replace("{line}", str(line)) in message


def two_trains_on_rank(rank: int, new_group: NewGroup, folder: str, reference_loss: str) -> Any:
    """Two nodes train one model in turn; each with its own learning rate, decay and clipping."""
    engine = make_engine(rank, new_group, folder, MESHES["one"], ADAM | {"lr": 5.0, "weight_decay": 5.0})
    function = Function(reference_loss, SIGNATURES["sequence_ratio"])
    data, reports = batch(), []
    for options in TURNS:
        node = train_node(ROWS, ROWS, options, function)
        reports.append(dict(engine.run(make_call(engine, rank, node, ROWS, 9, step=0), data).metrics))
    return reports, read_training(engine)


TURNS = (
    {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0},
    {"lr": 3e-3, "weight_decay": 0.5, "clip_grad": 0.2, "warmup_steps": 2},
)


def test_two_nodes_train_one_model_with_options_of_their_own(
    pool: Pool, folders: Folders, losses: Path
) -> None:
    folder, data = folders.of("llama", False), batch()
    (found,) = pool.run(1, two_trains_on_rank, folder, f"{losses}:sequence_ratio")
    reports, weights = found
    model = load_hf(folder, torch.float64)
    adam = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if (p.dim() > 1) == decays]} for decays in (True, False)],
        betas=ADAM["betas"], eps=ADAM["eps"],
    )  # fmt: skip
    for options, lr in zip(TURNS, (1e-2, 1.5e-3)):
        adam.zero_grad()
        rows = [reference_row(model, "lm", data, r) for r in range(ROWS)]
        loss, _ = ratio_loss(rows, {"rows": float(sum(bool(len(row.trained)) for row in rows))})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip_grad"] or float("inf"))
        for group, decay in zip(adam.param_groups, (options["weight_decay"], 0.0)):
            group |= {"lr": lr, "weight_decay": decay}
        adam.step()
    assert [report["lr"][0] for report in reports] == [1e-2, 1.5e-3]
    assert reports[1]["grad_norm"][0] > 0.2, "the second node clips"
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            torch.from_numpy(weights[name][2]).double(), weight.detach(), atol=5e-6, rtol=1e-5
        )
