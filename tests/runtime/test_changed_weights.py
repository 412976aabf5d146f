"""Changed weights alone, between real processes: readers end up with all of the trainer's weights, having
received no more than the places and values of those that changed, and say so where they do not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hflow.compiler.lowering import UnloweredWeightEdge
from hflow.plan.cluster import Link
from hflow.plan.edges import WeightEdge
from hflow.plan.layout import Mesh, volume
from hflow.plan.parameters import parameters
from hflow.plan.sharding import Sharding
from hflow.runtime.element_bits import element_bits
from hflow.runtime.worker import route
from hflow.runtime.worker.changed_weights import SentWeights
from hflow.runtime.worker.move_weights import move_weights
from hflow.runtime.worker.transfer import Received
from hflow.runtime.worker.world import Peers, World
from tests.engines.processes import Pool, RankError
from tests.runtime.test_move_weights import (
    CLUSTER,
    SHAPE,
    Boxes,
    boxes_of,
    index,
    ranks_of,
    values_of,
)

TRAINERS = {"tp2": Mesh.of((0, 1), tp=2), "pp2": Mesh.of((0, 1), pp=2), "dp2": Mesh.of((0, 1), dp=2)}
READERS = {"tp2": Mesh.of((2, 3), tp=2), "dp2": Mesh.of((2, 3), dp=2), "one": Mesh.of((3,), tp=1)}
SLOW = replace(CLUSTER, inter_host=Link(1e7, 1e-4))
EVERY = 50  # of so many weights one changes before the second transfer
UPDATES = (10**9, EVERY, EVERY, 1)


class Bf16Boxes(Boxes):
    def __init__(self, mesh: Mesh, rank: int, fill: bool):
        super().__init__(mesh, rank, fill)
        self.tensors = {name: tensor.to(torch.bfloat16) for name, tensor in self.tensors.items()}


def changed(name: str, shape: tuple[int, ...], every: int) -> torch.Tensor:
    """The whole parameter after an update of one of `every` weights."""
    values = values_of(name, shape).to(torch.bfloat16).flatten()
    values[::every] += 1.0
    return values.view(shape)


def update(weights: Boxes, mesh: Mesh, rank: int, every: int) -> None:
    for name, shape, box in boxes_of(SHAPE, mesh, rank):
        weights.view(name, box).copy_(changed(name, shape, every)[index(box)])


@dataclass(frozen=True)
class Transfer:
    """What a rank received, and what it should have; the elements of its target that came out wrong; what
    share of what it sent had changed; and the bytes that it keeps of it."""

    received: Received
    expected: Received
    wrong: int
    share: float
    kept: int


def transfers(
    rank: int, new_group: Any, edge: WeightEdge, limits: tuple[int, int], damage: bool = False
) -> list[Transfer]:
    """Four, of which the second finds few changes, the third none, and the fourth that all have changed.

    Args:
        damage: before the second the last reader has lost a weight.
    """
    route.SMALL_ELEMENTS, route.ROUND_ELEMENTS = limits
    peers = Peers(ranks_of(edge), new_group(ranks_of(edge)))
    if rank not in peers.ranks:
        return []
    world, trainer, reader = World(rank, 4, torch.device("cpu")), edge.source_mesh, edge.target_mesh
    source = Bf16Boxes(trainer, rank, True) if rank in trainer.devices else None
    target = Bf16Boxes(reader, rank, False) if rank in reader.devices else None
    mine = route.make_route(edge.copies, SHAPE, source, target, rank)
    sent, found = SentWeights(), list[Transfer]()
    for number, every in enumerate(UPDATES):
        if source:
            update(source, trainer, rank, every)
        if target and damage and number == 1 and rank == 3:
            target.tensors["model.norm.weight"][1] += 1
        sent.begin()
        received = move_weights(mine, source, target, torch.bfloat16, world, peers, sent)
        wrong = num_wrong(target, reader, rank, every) if target else 0
        share = sent.changed / max(1, sent.compared)
        found.append(Transfer(received, expected(mine, number), wrong, share, sent.nbytes))
    return found


def num_wrong(weights: Boxes, mesh: Mesh, rank: int, every: int) -> int:
    return sum(
        int((weights.view(name, box) != changed(name, shape, every)[index(box)]).sum())
        for name, shape, box in boxes_of(SHAPE, mesh, rank)
    )


def expected(mine: route.Route, number: int) -> Received:
    """What comes to a rank in a transfer: of each message from a trainer either all weights, two bytes each,
    or a checksum of eight and six for each weight that has changed; what readers pass on is whole."""
    found, of = Received(), {parameter.name: parameter.shape for parameter in parameters(SHAPE)}
    for phase in mine.phases:
        for message in (m for m in phase.messages() if m.target == mine.rank):
            before, now = (
                [changed(name, of[name], UPDATES[n])[index(box)] for name, box in message.parts]
                for n in (number - 1, number)
            )
            count = sum(int((one != other).sum()) for one, other in zip(before, now))
            size = 2 * message.size
            is_whole = phase.relay or number == 0
            found += Received(size if is_whole else min(size, 8 + 6 * count), 0 if phase.relay else 8)
    return found


def edge_of(trainer: str, reader: str) -> WeightEdge:
    ends = Sharding(TRAINERS[trainer]), Sharding(READERS[reader])
    return UnloweredWeightEdge("w", "a", "b", SHAPE, "bf16", *ends, changed=0.02).lowered(SLOW)


@pytest.mark.parametrize("limits", [(0, 2**24), (64, 2**24), (2**14, 300)], ids=["alone", "packed", "rounds"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.matrix(4)
def test_only_changes_travel(pool: Pool, trainer: str, reader: str, limits: tuple[int, int]) -> None:
    """Bit for bit what the trainer has, in the bytes that places and values of the changes take."""
    edge = edge_of(trainer, reader)
    assert edge.changed == 0.02
    ranks = pool.run(4, transfers, edge, limits)
    assert all(one.wrong == 0 and one.received == one.expected for found in ranks for one in found)
    whole, few, none, every = (ranks[3][number].received.values for number in range(4))
    assert whole == every > few > none
    shares = [[one.share for one in found] for found in ranks[:2] if found and found[3].share]
    assert shares
    for first, second, third, fourth in shares:
        assert (first, third) == (0.0, 0.0) and second == pytest.approx(1 / EVERY, rel=0.5)
        assert fourth > 0.9


def test_a_trainer_keeps_no_more_than_its_weights(pool: Pool) -> None:
    edge = edge_of("tp2", "one")
    for rank, found in enumerate(pool.run(4, transfers, edge, (64, 2**24))):
        held = boxes_of(SHAPE, edge.source_mesh, rank)
        weights = 2 * sum(volume(box) for _, _, box in held)
        norms = 2 * sum(
            volume(box) for name, _, box in boxes_of(SHAPE, edge.source_mesh, rank) if "norm" in name
        )
        for one in found:
            assert weights - norms <= one.kept <= weights, (
                "norms lie on both trainers, of which one sends them"
            )


def test_of_large_messages_little_travels(pool: Pool) -> None:
    """One of fifty weights changes: 6 bytes for 100."""
    found = pool.run(4, transfers, edge_of("dp2", "one"), (2**24, 2**24))[3]
    assert found[1].received.values < 0.07 * found[0].received.values


def test_a_reader_that_has_lost_a_weight_says_so(pool: Pool) -> None:
    with pytest.raises(RankError, match="model.norm.weight.* differs from what was sent"):
        pool.run(4, transfers, edge_of("dp2", "dp2"), (0, 2**24), True)


def test_bits_tell_what_values_do_not() -> None:
    zeros, nans = torch.tensor([0.0, -0.0]), torch.full((2,), torch.nan)
    assert (zeros == zeros.flip(0)).all() and (element_bits(zeros) != element_bits(zeros.flip(0))).all()
    assert not (nans == nans).any() and (element_bits(nans) == element_bits(nans)).all()
