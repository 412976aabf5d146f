"""The last layer's MLP runs where the head reads, and gradients are those of a layer that runs everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hflow.plan.layout import Mesh
from hflow.plan.packing import TokenBudget
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.decoder import Decoder
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.micro_batches import MicroBatch, micro_batches
from hflow.runtime.engines.megatron.schedule import run_schedule
from tests.engines.models import Folders, make_engine
from tests.engines.processes import Pool
from tests.engines.test_pack import RAGGED, sequences_of

Passed = tuple[list[int], list[Tensor]]
PLACES = 13  # in the pack of `RAGGED`, of which those are read that predict something: not 5 6 | 5 | 8 of it
READ = 10


def passes_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, sp: bool
) -> tuple[Passed, Passed]:
    """As it is, and with a number for every place, as of dropout, by which all of them run: how many places
    the MLP of each layer has seen; logits, and the gradients of all weights."""
    as_it_is, everywhere = (_pass(rank, new_group, folder, mesh, sp, every) for every in (False, True))
    return as_it_is, everywhere


def _pass(rank: int, new_group: NewGroup, folder: str, mesh: Mesh, sp: bool, everywhere: bool) -> Passed:
    engine, seen, found = make_engine(rank, new_group, folder, mesh), list[int](), list[Tensor]()
    for layer in engine.model.decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))

    def finish(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, None]:
        found.append(OutputMatrix.of(engine.model).logits(hidden))
        return found[0].square().sum(), None

    sequences = sequences_of(RAGGED)
    if everywhere:
        sequences = replace(sequences, draws=torch.zeros_like(sequences.tokens))
    multiple = mesh.tp if sp else 1
    batches = micro_batches(
        sequences,
        torch.arange(len(sequences)),
        TokenBudget(100, 100),
        same_shape=False,
        multiple=multiple,
        cp=engine.groups.cp,
    )
    run_schedule(engine.model, engine.groups, batches, finish, sp=sp)
    gradients: Any = (p.grad if p.grad is not None else p.main_grad for p in engine.model.parameters())
    return seen, [*(x.detach() for x in found), *(x.clone() for x in gradients)]


@pytest.mark.parametrize(
    ("variant", "layout", "expected"),
    [
        ("llama", "one", [PLACES] * 3 + [READ]),
        ("gemma2", "one", [PLACES] * 3 + [READ]),
        ("llama", "tp2", [PLACES] * 3 + [READ]),
        ("llama", "tp2 sp", [(PLACES + 1) // 2] * 4),
        ("mixtral", "one", [PLACES] * 4),
    ],
)
def test_the_last_mlp_sees_what_is_read(
    pool: Pool, folders: Folders, variant: str, layout: str, expected: list[int]
) -> None:
    """Ranks of sp have a part of the places each, and routers count all."""
    mesh = Mesh.of((0,)) if layout == "one" else Mesh.of((0, 1), tp=2)
    results = pool.run(len(mesh.devices), passes_on_rank, folders.of(variant, False), mesh, "sp" in layout)
    for (seen, mine), (everywhere, theirs) in results:
        assert seen == expected and set(everywhere) == {expected[0]}
        for own, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))


def prompts_on_rank(rank: int, new_group: NewGroup, folder: str) -> list[tuple[int, ...]]:
    """What the MLP of each layer is given of 3 prompts of 5 tokens."""
    engine, seen = make_engine(rank, new_group, folder, Mesh.of((0,))), list[tuple[int, ...]]()
    decoder, through = Decoder(engine.model, 8), Decoder._mlp

    def mlp(self: Decoder, number: int, layer: Any, x: Tensor) -> Tensor:
        seen.append(tuple(x.shape[:2]))
        return through(self, number, layer, x)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Decoder, "_mlp", mlp)
        decoder(torch.full((3, 5), 7), None, decoder.cache(3, 8))
    return seen


@pytest.mark.parametrize(("variant", "last"), [("llama", 1), ("mixtral", 5)])
def test_of_prompts_it_sees_the_last_token(pool: Pool, folders: Folders, variant: str, last: int) -> None:
    """With experts all, whose routes may be asked for."""
    [seen] = pool.run(1, prompts_on_rank, folders.of(variant, False))
    assert seen == [(3, 5)] * 3 + [(3, last)]
