"""Micro-batches through the model by Megatron's own schedules: 1F1B where there are pipeline stages, and the
interleaved one where each has several chunks of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron.attention import TokenPlaces
from hflow.runtime.engines.megatron.collection import collection
from hflow.runtime.engines.megatron.context_shard import ContextShard
from hflow.runtime.engines.megatron.interleaved import chunks_of
from hflow.runtime.engines.megatron.micro_batches import MicroBatch
from hflow.runtime.engines.megatron.moe.routes import RoutedTokens
from hflow.runtime.engines.megatron.pack import Pack
from hflow.runtime.engines.megatron.rotary import Rotation
from hflow.runtime.engines.megatron.sequence_parallel import all_places, sequence_parallel
from hflow.runtime.engines.megatron.shaped_config import shape_of_model

# What the last stage does at this rank's places that predict a micro-batch's response tokens, with their
# hidden states ``[tokens, hidden]`` or, from a scalar head, values ``[tokens, 1]``: the loss to differentiate
# (a scalar), and a value to keep.
Finish = Callable[[Tensor, MicroBatch], tuple[Tensor, Any]]


def run_schedule(
    model: torch.nn.Module,
    groups: Groups,
    batches: tuple[MicroBatch, ...],
    finish: Finish,
    forward_only: bool = False,
    sp: bool = False,
    passed: Sequence[Tensor] | None = None,
) -> list[Any]:
    """Pass all micro-batches forward (and backward); gradients add up in the model's buffers.

    Collective over the pipeline, context- and tensor-parallel groups; the number of micro-batches may differ
    between data-parallel ranks. Of interleaved stages it is a multiple of their number.

    Args:
        sp: sequence parallelism.
        passed: what an earlier forward pass gave for each micro-batch (`Finish`), with what its backward pass
            needs; none is made again. Of a model without pipeline stages.

    Returns:
        What `finish` wants kept of each micro-batch; empty on all stages but the last.
    """
    chunks = chunks_of(model)
    several = len(chunks) > 1
    schedule = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=len(chunks) if several else None)
    config = get_model_config(model)
    earlier = None if passed is None else iter(passed)

    def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches)
        if earlier:
            return next(earlier), lambda heads: _three(finish(heads, batch))
        has_head = bool(get_attr_wrapped_model(model, "post_process"))
        output = forward(model, batch.pack, has_head, groups.tp if sp else None)
        return output, lambda heads: _three(finish(heads.squeeze(0), batch))

    with sequence_parallel(model, sp):
        return schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if several else iter(batches),
            model=chunks if several else model,
            num_microbatches=len(batches),
            seq_length=len(batches[0].pack.tokens),
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=P2PCommunicator(groups.pp, config),
            pg_collection=collection(groups),
        )


def _three(finished: tuple[Tensor, Any]) -> tuple[Tensor, Tensor, Any]:
    """Megatron divides the loss unless it comes with a token count; the count itself goes unused."""
    loss, kept = finished
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), kept


def forward(
    model: torch.nn.Module, pack: Pack | ContextShard, has_head: bool, sp: ProcessGroup | None = None
) -> Tensor:
    """What `build_model` says, with a head at the places that predict only: ``[1, tokens, …]``.

    Args:
        sp: the tensor-parallel group whose ranks each have a part of the places.
    """
    shape, dtype = shape_of_model(model), get_model_config(model).params_dtype
    of_tokens = pack.positions, shape, dtype
    routed = RoutedTokens.of(pack, shape.moe.top_k, sp) if shape.moe else None
    # Ranks of sp have other places than those that the head reads, and dropout has a number for every place.
    of_all = not has_head or bool(shape.moe) or sp is not None or pack.draws is not None
    places = pack.predicted_at
    read, predicted_at = (None, places) if of_all else places.unique(return_inverse=True)
    known = TokenPlaces(pack, Rotation.of(*of_tokens), Rotation.windowed(*of_tokens), routed, read)
    run = partial(model, pack.tokens[None], None, known)  # Megatron hands the mask on to the layers
    if not has_head:
        return run()
    output_layer: Any = get_attr_wrapped_model(model, "output_layer")
    hook = output_layer.register_forward_pre_hook(_only_at(predicted_at, sp))
    try:
        return run()
    finally:
        hook.remove()


def _only_at(places: Tensor, sp: ProcessGroup | None) -> Callable[..., tuple[Tensor, ...]]:
    """Let the output layer see ``[places, 1, hidden]`` only at the given places."""
    whole = (lambda hidden: all_places(hidden, sp)) if sp else lambda hidden: hidden
    return lambda _, args: (whole(args[0])[places], *args[1:])
