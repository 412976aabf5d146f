"""The load-balancing loss of Switch Transformers (arXiv:2101.03961, eq. 4 to 6), exact over a minibatch.

Of a layer with N experts it is N * sum_i f_i P_i: f_i is the share of expert i among the choices of all
tokens, P_i the mean of its probability over them. It is 1 where all experts are chosen alike. Only P has a
gradient, in which f is a constant. But f is known when all tokens of the minibatch have chosen: so these pass
forward once more before, to be counted. A share of each micro-batch's own choices would make the loss depend
on how rows are cut into micro-batches, and so on the plan.

A token is a place of a row that is an input of the model: prompts, which rows may share, count for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import all_reduce

from hflow.plan.pipeline_stages import stage_chunks
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron.interleaved import chunks_of
from hflow.runtime.engines.megatron.micro_batches import MicroBatch
from hflow.runtime.engines.megatron.moe.router import Router
from hflow.runtime.engines.megatron.schedule import Finish, run_schedule
from hflow.runtime.engines.megatron.shaped_config import shape_of_model


@contextmanager
def balanced(
    model: torch.nn.Module, groups: Groups, batches: tuple[MicroBatch, ...], coef: float, sp: bool = False
) -> Iterator[float]:
    """Within, the backward passes of these micro-batches also add the gradient of `coef` times the loss, the
    mean over layers. Collective over the mesh.

    Args:
        sp: sequence parallelism.

    Yields:
        The loss of the minibatch, without `coef`, on every rank.
    """
    shape = shape_of_model(model)
    assert shape.moe
    routers = [module for module in model.modules() if isinstance(module, Router)]
    chunks = stage_chunks(shape.num_layers, groups.pp.size(), groups.pp.rank(), len(chunks_of(model)))
    here = [layer for chunk in chunks for layer in chunk]
    found = torch.zeros(shape.num_layers, 2, shape.moe.num_experts, dtype=torch.float64)
    found = found.to(routers[0].weight.device)
    counted = _count(model, routers, groups, batches, sp)
    if sp or groups.tp.rank() == 0:  # its peers have counted other tokens, or else the same
        found[here] = counted
    all_reduce(found, group=groups.mesh)
    choices, probabilities = found.unbind(1)
    tokens = choices.sum(-1, keepdim=True) / shape.moe.top_k
    slopes = shape.moe.num_experts * choices / (shape.moe.top_k * tokens**2)
    loss = float((slopes * probabilities).sum(-1).mean())
    for router, slope in zip(routers, coef / shape.num_layers * slopes[here]):
        router.slope = slope.float()
    try:
        yield loss
    finally:
        for router in routers:
            router.slope = None


@torch.no_grad()
def _count(
    model: torch.nn.Module,
    routers: list[Router],
    groups: Groups,
    batches: tuple[MicroBatch, ...],
    sp: bool,
) -> torch.Tensor:
    """``[layers of this stage, 2, experts]``: choices, and sums of probabilities."""
    for router in routers:
        router.tally = torch.zeros(2, len(router.weight), dtype=torch.float64, device=router.weight.device)
    nothing: Finish = lambda heads, _: (heads.new_zeros(()), None)  # noqa: E731
    run_schedule(model, groups, batches, nothing, forward_only=True, sp=sp)
    tallies = [router.tally for router in routers if router.tally is not None]
    for router in routers:
        router.tally = None
    return torch.stack(tallies)
