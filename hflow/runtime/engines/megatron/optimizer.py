"""Adam over a mesh: gradient buffers, their reduction, clipping and the update, all by Megatron."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite, sqrt
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.utils import get_model_config
from torch import Tensor

from hflow.runtime.engines.gather_json import gather_json
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron import present_device
from hflow.runtime.engines.megatron.collection import collection
from hflow.runtime.engines.megatron.host import HostMemory, drop
from hflow.runtime.engines.megatron.interleaved import Interleaved, chunks_of
from hflow.runtime.engines.megatron.kv_copies import KvCopies
from hflow.runtime.engines.megatron.learning_rate import LearningRate

MOMENTS = ("exp_avg", "exp_avg_sq")
OVERLAPPING = ("cuda",)  # where sending takes no time from computing: on a CPU both need its cores
SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class AdamOptions:
    """Options of a train node that concern its updates (AdamW, arXiv:1711.05101).

    Several train nodes may share one optimizer: its moments decay by the `betas` of the one it was made
    for, the rest is each node's own.

    `clip_grad`: greatest norm of the gradient, 0 for no limit. Norm weights and biases do not decay.
    """

    rate: LearningRate
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float

    @staticmethod
    def of(options: Mapping[str, Any], total_updates: int = 0) -> AdamOptions:
        """Of a train node that makes so many updates in the whole run, which only schedules ask for."""
        beta1, beta2 = options["betas"]
        return AdamOptions(
            rate=LearningRate.of(options, total_updates),
            betas=(float(beta1), float(beta2)),
            eps=float(options["eps"]),
            weight_decay=float(options["weight_decay"]),
            clip_grad=float(options["clip_grad"]),
        )


class Adam:
    """The optimizer of one model on one rank. Weights must be loaded before it is made, and those that it is
    to leave as they are must not require gradients: it holds nothing for them.

    With `split` (ZeRO-1, arXiv:1910.02054) a rank reduces, and keeps moments and float32 copies for, its part
    of the weights, one of as many as there are data-parallel ranks; updated weights are gathered.

    Moments, float32 copies and gradients can leave the device between updates (`offload`, `onload`).
    """

    def __init__(self, model: torch.nn.Module, groups: Groups, options: AdamOptions, split: bool = False):
        shaped: Any = get_model_config(model)
        overlaps = _overlaps(groups, shaped)
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=split, overlap_grad_reduce=overlaps
        )
        self._chunks = [
            DistributedDataParallel(shaped, buffers, chunk, pg_collection=collection(groups))
            for chunk in chunks_of(model)
        ]
        self.model = Interleaved(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
        if overlaps:  # of an update's last micro-batch alone
            skips = [chunk.no_sync for chunk in self._chunks]
            shaped.no_sync_func = skips if len(skips) > 1 else skips[0]
        self._kv_copies = KvCopies.of(model, groups)
        shaped.finalize_model_grads_func = partial(_sum_gradients, self._kv_copies)
        self._counts_once = groups.mesh if split else groups.replica
        config = _config(options, shaped.params_dtype, split)
        with _same_groups(groups.mesh):
            chain: Any = get_megatron_optimizer(
                config,
                [*self._chunks],
                config_overrides=get_standard_config_overrides(config),
                use_gloo_process_groups=False,
                pg_collection=collection(groups),
            )
        # One for what is reduced over dp, and one for experts that are spread over some of its ranks.
        self._chain, self.parts = chain, tuple(chain.chained_optimizers)
        self._places: dict[Tensor, tuple[Tensor, int]] = {}
        self._moments: dict[Tensor, Mapping[str, Tensor]] = {}
        for part in self.parts:
            _fuse(part.optimizer)
            self._places |= _places(part)
            _begin_state(part.optimizer)
            self._moments |= part.optimizer.state
        self._trains_copies = config.bf16
        self.dtype: torch.dtype = config.params_dtype
        self._host = HostMemory()
        self._updates = 0
        self.present = True

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._chain.zero_grad()

    def prepare(self, clip_grad: float) -> float:
        """Take the reduced gradients and clip them; their norm before clipping, the same on all ranks."""
        self._chain.prepare_grads()
        norm = self._without_copies(float(self._chain.get_grad_norm()))
        for part in self.parts if clip_grad > 0 else ():
            if part.get_parameters():
                clip_grad_by_total_norm_fp32(part.get_parameters(), clip_grad, norm)
        return norm

    def _without_copies(self, norm: float) -> float:
        """Of a gradient that counts key-value heads as often as there are ranks with them, the norm."""
        if self._kv_copies.group.size() == 1 or not isfinite(norm):
            return norm
        mine = self._kv_copies.repeated_square(self._owned)
        more = torch.tensor(mine, dtype=torch.float64, device=present_device.current_device())
        dist.all_reduce(more, group=self._counts_once)
        return sqrt(max(0.0, norm**2 - float(more)))

    def _owned(self, parameter: Tensor) -> tuple[int, int]:
        """The elements that this rank updates."""
        if parameter not in self._places:
            return 0, 0
        place, start = self._places[parameter]
        return start, start + place.numel()

    def update(self, lr: float, weight_decay: float) -> None:
        """Change the weights by the gradients that `prepare` took."""
        for group in self._chain.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay * group["wd_mult"]
        self._chain.step_with_ready_grads()
        self._updates += 1

    def reload_weights(self) -> None:
        """Take over weights that were written into the model (the float32 copies of bf16 weights)."""
        self._chain.reload_model_params()

    def state(self) -> list[Tensor]:
        """What this rank keeps from one update to the next: moments, and float32 copies of bf16 weights."""
        moments = [s[key] for s in self._moments.values() for key in MOMENTS]
        trained = [p for group in self._chain.param_groups for p in group["params"]]
        return moments + (trained if self._trains_copies else [])

    @property
    def updates(self) -> int:
        """How many have been made, also on a rank that has nothing to train."""
        return self._updates

    @updates.setter
    def updates(self, number: int) -> None:
        self._updates = number
        for state in self._moments.values():
            if "step" in state:
                state["step"].fill_(number)
        for group in self._chain.param_groups:
            if "step" in group:
                group["step"] = number

    def kept(self, parameter: Tensor, key: str) -> tuple[Tensor, int]:
        """What this rank keeps for a parameter of the model, wherever it lies now: ``weights`` in float32, or
        the moment ``exp_avg`` or ``exp_avg_sq``.

        Returns:
            The values in one dimension, a view; and the element of the parameter that the first belongs to.
            Of an optimizer that is split, they may be none; of a parameter that is not trained, there are no
            moments, and its weights are the model's own.
        """
        if not parameter.requires_grad and key == "weights":
            return parameter.detach().view(-1), 0
        if parameter not in self._places:
            return torch.empty(0), 0
        place, start = self._places[parameter]
        found = place if key == "weights" else self._moments[place][key]
        return self._host.copy_of(found).view(-1), start

    def offload(self) -> int:
        """Move the state to the host's memory and drop the gradients. Returns bytes copied."""
        if not self.present:
            return 0
        self._chain.zero_grad()  # forget gradients that are no views of the buffers
        for gradients in self._gradients():
            gradients.untyped_storage().resize_(0)
        copied = self._host.store(self.state())
        drop(self.state())
        self.present = False
        return copied

    def onload(self) -> int:
        """Bring the state back, and make room for gradients. Returns bytes copied."""
        if self.present:
            return 0
        for gradients in self._gradients():
            gradients.untyped_storage().resize_(gradients.nbytes)
        self.present = True
        return self._host.restore(self.state())

    def _gradients(self) -> list[Tensor]:
        """Megatron's buffers, of which the gradients of the parameters are views."""
        chunks: list[Any] = self._chunks  # of which `buffers` is not torch's method of this name
        buffers = (b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers))
        return [buffer.grad_data for buffer in buffers]


def _overlaps(groups: Groups, config: Any) -> bool:
    """Whether gradients are summed over data-parallel ranks while others are still computed.

    Not those of experts: Megatron waits for a gradient of every weight, and one that no token reached has
    none.
    """
    several = groups.dp_cp.size() > 1
    return present_device.platform() in OVERLAPPING and several and not config.shape.moe


def _places(optimizer: Any) -> dict[Tensor, tuple[Tensor, int]]:
    """Of every parameter of the model what the optimizer updates: the parameter itself or its float32 copy,
    or the part of these that is this rank's, and with which element it begins."""
    if isinstance(optimizer, DistributedOptimizer):
        groups: Any = optimizer.optimizer.param_groups
        found: dict[Tensor, tuple[Tensor, int]] = {}
        for parameter, (group, index) in optimizer.model_param_group_index_map.items():
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            found[parameter] = groups[group]["params"][index], start
        return found
    copies: dict[Any, Any] = {}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups):
            copies |= dict(zip(models, mains))
    of_copy = {copy: parameter for parameter, copy in copies.items()}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    return {of_copy.get(p, p): (p, 0) for p in trained}


def _begin_state(adam: Any) -> None:
    """Moments of zero, as they are made before the first update: there is state from the start. torch counts
    updates per parameter, Transformer Engine and Apex per group."""
    is_torch = type(adam) is torch.optim.AdamW
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {key: torch.zeros_like(parameter) for key in MOMENTS}
            if is_torch:
                place = parameter.device if group["fused"] else "cpu"
                adam.state[parameter]["step"] = torch.zeros((), device=place)
        if not is_torch:
            group["step"] = 0


@contextlib.contextmanager
def _same_groups(group: dist.ProcessGroup) -> Iterator[None]:
    """Let Megatron compare parameter groups among the ranks of `group`.

    It asks the whole world (megatron/core/optimizer: `_get_param_groups`), where ranks outside the mesh
    never answer, and unpickles what they say.
    """
    everywhere = dist.all_gather_object

    def within(results: list[Any], value: Any) -> None:
        results[:] = [[_group_key(*key) for key in keys] for keys in gather_json(value, group)]

    dist.all_gather_object = within
    try:
        yield
    finally:
        dist.all_gather_object = everywhere


def _group_key(overrides: Any, expert: Any) -> tuple[tuple[tuple[str, Any], ...] | None, bool]:
    """Megatron's key of a parameter group, from JSON: which options differ, and whether it is of experts."""
    told = None if overrides is None else tuple((str(name), value) for name, value in overrides)
    if not isinstance(expert, bool) or any(not isinstance(value, SCALARS) for _, value in told or ()):
        raise ValueError(f"no key of a parameter group: {overrides}, {expert}")
    return told, expert


def _fuse(adam: Any) -> None:
    """Torch's AdamW would update by one operation after the other: on GPUs of all tensors at once, with
    temporaries that no plan counts, on CPUs in three times the time. Those of Transformer Engine and Apex are
    fused."""
    for group in adam.param_groups if type(adam) is torch.optim.AdamW else ():
        group["fused"], group["foreach"] = True, False


def _config(options: AdamOptions, dtype: torch.dtype, split: bool) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=options.rate.lr,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=split,
    )


def _sum_gradients(
    kv_copies: KvCopies, model: list[torch.nn.Module], num_tokens: Any, **options: Any
) -> None:
    """Add gradients up over data-parallel ranks, without dividing by Megatron's token count, and over those
    that have the same key-value head."""
    finalize_model_grads(model, None, **options)
    kv_copies.sum_gradients()
