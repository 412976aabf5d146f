"""hflow's engine beside transformers on the same device: what it scores, learns and generates.

float32 is held to 1e-4. In bf16 both are compared with transformers in float32 and the same weights: hflow's
may err no more than transformers' own bf16, within what a sample of 640 tokens leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hflow.plan.packing import TokenBudget
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.ends import EndRule
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.megatron.generate import Sampling, generate
from hflow.runtime.engines.megatron.score import score
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.rows import Rows, from_lists
from hflow.runtime.worker.world import World
from scripts.gpu_acceptance.models import END, PADDING, alone, engine, load, vivid_model
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need
from scripts.gpu_acceptance.update import ADAM, MICRO_BATCH, update

CLOSE, MARGIN = 1e-4, 1.15
ROWS, NEW = 64, 24
Scores = tuple[Tensor, Tensor]


def run(setting: Setting) -> Figures:
    folder = vivid_model(setting.folder / "numerics")
    world = alone(setting)
    tokens, lengths = ragged()
    figures = _scores(world, folder, tokens, lengths) | _updates(world, folder, tokens, lengths)
    figures |= _greedy(world, folder, [row[: len(row) - n] for row, n in zip(tokens, lengths)])
    world.close()
    for name in ("logprobs_f32", "entropy_f32", "gradient_f32", "adam_f32", "adam_recomputed_f32"):
        need(figures[name] <= CLOSE, f"{name} is more than {CLOSE}", figures)
    for name in ("logprobs", "entropy"):
        ours, theirs = figures[f"{name}_bf16"], figures[f"{name}_bf16_transformers"]
        need(ours <= MARGIN * theirs, f"{name} in bf16: less exact than transformers", figures)
    need(figures["greedy_rows_equal"] == ROWS, "greedy tokens are others than transformers'", figures)
    if not setting.on_gpu:
        raise Skipped("all comparisons hold on this CPU; those of CUDA's kernels are left", figures)
    return figures


def ragged() -> tuple[list[list[int]], list[int]]:
    """Rows of token ids, and how many of each row's are its response."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 20, (ROWS,), generator=generator).tolist()
    prompts = torch.randint(1, 12, (ROWS,), generator=generator).tolist()
    rows = [torch.randint(3, 16, (p + n,), generator=generator).tolist() for p, n in zip(prompts, lengths)]
    return rows, lengths


def sequences(tokens: Sequence[list[int]], lengths: Sequence[int], device: torch.device) -> Sequences:
    mask = Rows(torch.ones(sum(lengths), dtype=torch.bool), torch.tensor(lengths))
    return Sequences.of(from_lists(tokens), mask, device)


def _scores(world: World, folder: Path, tokens: list[list[int]], lengths: list[int]) -> Figures:
    exact = _of_transformers(folder, torch.float32, tokens, lengths, world.device)
    halved = _of_transformers(folder, torch.bfloat16, tokens, lengths, world.device)
    ours = {
        "f32": _of_hflow(engine(world, folder, "f32"), tokens, lengths),
        "bf16": _of_hflow(engine(world, folder, "bf16"), tokens, lengths),
    }
    figures: Figures = {}
    for at, name in enumerate(("logprobs", "entropy")):
        figures[f"{name}_f32"] = float((ours["f32"][at] - exact[at]).abs().max())
        figures[f"{name}_bf16"] = float((ours["bf16"][at] - exact[at]).abs().mean())
        figures[f"{name}_bf16_transformers"] = float((halved[at] - exact[at]).abs().mean())
    return figures


def _of_hflow(model: MegatronModel, tokens: list[list[int]], lengths: list[int]) -> Scores:
    budget = TokenBudget(MICRO_BATCH * max(map(len, tokens)), MICRO_BATCH * max(lengths))
    found = score(model.model, model.groups, sequences(tokens, lengths, model.device), budget, 1.0)
    assert found
    return found[0].cpu(), found[1].cpu()


@torch.no_grad()
def _of_transformers(
    folder: Path, dtype: torch.dtype, tokens: list[list[int]], lengths: list[int], device: torch.device
) -> Scores:
    """Row by row."""
    model, found = load(folder, dtype, device), list[Tensor]()
    for row, length in zip(tokens, lengths):
        logits: Tensor = model(torch.tensor([row], device=device)).logits[0].float()
        log_p = logits.log_softmax(-1)[len(row) - length - 1 : -1]
        chosen = log_p.gather(1, torch.tensor(row[len(row) - length :], device=device)[:, None]).squeeze(1)
        found.append(torch.stack((chosen, -(log_p.exp() * log_p).sum(-1))))
    both = torch.cat(found, 1).cpu()
    return both[0], both[1]


def _updates(world: World, folder: Path, tokens: list[list[int]], lengths: list[int]) -> Figures:
    """One update by the mean negative log-likelihood: its gradient, and the weights after it."""
    gradients, weights = _by_torch(folder, tokens, lengths, world.device)
    found = {}
    for name, strategy in (("", PLAIN), ("_recomputed", Strategy(recompute="full"))):
        model = engine(world, folder, "f32", dict(ADAM), strategy)
        ours, after = update(model, tokens, lengths, strategy)
        found[f"gradient{name}_f32"] = _apart(ours, gradients)
        found[f"adam{name}_f32"] = max(float((after[n] - w).abs().max()) for n, w in weights.items())
    return found


def _by_torch(
    folder: Path, tokens: list[list[int]], lengths: list[int], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = load(folder, torch.float32, device)
    for row, length in zip(tokens, lengths):
        logits: Tensor = model(torch.tensor([row], device=device)).logits[0]
        targets = torch.tensor(row[len(row) - length :], device=device)
        loss = torch.nn.functional.cross_entropy(logits[len(row) - length - 1 : -1], targets, reduction="sum")
        (loss / sum(lengths)).backward()
    named = dict(model.named_parameters())
    gradients = {n: p.grad.detach().cpu().clone() for n, p in named.items() if p.grad is not None}
    options: dict[str, Any] = {key: ADAM[key] for key in ("lr", "betas", "eps", "weight_decay")}
    torch.optim.AdamW(model.parameters(), **options).step()
    return gradients, {n: p.detach().cpu() for n, p in named.items()}


def _apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The greatest difference, relative to the largest element of all."""
    largest = max(float(g.abs().max()) for g in theirs.values())
    return max(float((ours[n] - g).abs().max()) for n, g in theirs.items()) / largest


def _greedy(world: World, folder: Path, prompts: list[list[int]]) -> Figures:
    """Ragged prompts in two waves, against transformers with one prompt after the other."""
    model = engine(world, folder, "f32")
    sampling = Sampling(NEW, 0.0, seed=0, step=0, stream=0, ends=EndRule(END))
    found = generate(model.model, from_lists(prompts), torch.arange(ROWS), sampling, ROWS // 2, world.device)
    theirs, equal = load(folder, torch.float32, world.device), 0
    for prompt, row, length in zip(prompts, found.tokens.tolist(), found.lengths.tolist()):
        given = torch.tensor([prompt], device=world.device)
        with torch.no_grad():
            expected = theirs.generate(  # pyright: ignore[reportCallIssue]
                given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False,
                eos_token_id=END, pad_token_id=PADDING,
            )[0].tolist()  # fmt: skip
        equal += row[:length] == expected[len(prompt) :]
    return {"greedy_rows_equal": equal}


if __name__ == "__main__":
    main(run)
