"""Numbers that are not finite, told by name where they arise and not where they lead to."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.runtime.engines.gather_json import gather_json
from hflow.runtime.engines.megatron.weights import MegatronWeights
from hflow.runtime.engines.protocol import EngineCall, NodeError

NO_FAULT = ""


def norms_are_finite(model: torch.nn.Module) -> Tensor:
    """Whether every weight of this rank has a norm in float32: a bool scalar, from one pass over the weights.

    A norm may be infinite although the weight is not: above 1.8e19, whose square is. Products with other
    numbers of that size, such as those of queries and keys, are no numbers any more.
    """
    norms = [torch.linalg.vector_norm(weight.detach(), dtype=torch.float32) for weight in model.parameters()]
    return torch.stack(norms).isfinite().all()


def weight_fault(weights: MegatronWeights) -> tuple[int, str]:
    """The first weight of this rank, in the model's order, that is not finite or has no finite norm.

    Returns:
        Its number in that order and a sentence, or any number and `NO_FAULT`.
    """
    order = {name: number for number, name in enumerate(weights.shapes)}
    for name in weights.names():
        values = weights.read(name, weights.box(name))
        fault = _fault(values)
        if fault:
            return order[name], f"weight `{name}` {fault}"
    return len(order), NO_FAULT


def diverged(
    call: EngineCall, weights: MegatronWeights, group: ProcessGroup, problem: str, otherwise: str = NO_FAULT
) -> NodeError:
    """HF405 with node and step, the same on all ranks of `group`. Collective.

    Args:
        problem: what was seen, on at least one of the ranks; elsewhere empty.
        otherwise: what this rank knows in case that no weight is the cause.
    """
    number, fault = weight_fault(weights)
    own = (number, fault, problem) if fault else (len(weights.shapes), otherwise, problem)
    found = [(int(first), str(why), str(told)) for first, why, told in gather_json(own, group)]
    cause = min((f for f in found if f[1]), default=(0, "all weights are finite"))[1]
    seen = next(told for *_, told in found if told)
    return NodeError(call.node.name, f"{call.when}: {seen}; {cause}", "HF405")


def agreed(fine: Tensor, group: ProcessGroup) -> bool:
    """Whether all ranks of `group` are `fine`, a bool scalar. Collective."""
    if group.size() == 1:
        return bool(fine)
    shared = fine.to(torch.float32)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=group)
    return bool(shared)


def _fault(values: Tensor) -> str:
    if torch.linalg.vector_norm(values, dtype=torch.float32).isfinite():
        return NO_FAULT
    bad = values[~values.isfinite()]
    if len(bad):
        return f"holds {float(bad[0])}"
    return f"holds numbers up to {float(values.abs().max()):.3g}, whose squares are not finite"
