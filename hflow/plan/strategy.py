"""How a node trades time for memory, beside its mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hflow.plan.engine_registry import DEFAULT_ENGINE, GenerationEngine


@dataclass(frozen=True)
class Strategy:
    """`recompute`: ``full`` keeps each layer's input only and repeats its forward pass before the backward
    pass. `zero` (ZeRO, arXiv:1910.02054) splits over dp: 1 the optimizer, 3 also gradients and weights.
    `ep`: so many ranks share the experts of each layer, each holding its part of them (`Sharding`); with
    `whole_experts` tp cuts none, but its ranks are among those (Megatron's `expert_tensor_parallel_size: 1`).
    `kv_cache`: whether generation keeps keys and values; without, each new token reads all before it again.
    `engine`: what generates; every other kind of node runs on the default engine.
    `sp`: sequence parallelism (arXiv:2205.05198); what lies between matrix products is split over tp, too.
    `vpp`: virtual pipeline size (arXiv:2104.04473); each rank of pp has so many chunks of layers, in turn.
    `share_forward`: a score node and the first update of its model's train node have one forward pass
    (`hflow.plan.shared_forward`).
    """

    recompute: Literal["none", "full"] = "none"
    zero: Literal[0, 1, 3] = 0
    ep: int = 1
    whole_experts: bool = False
    kv_cache: bool = True
    engine: GenerationEngine = DEFAULT_ENGINE
    sp: bool = False
    vpp: int = 1
    share_forward: bool = False

    @cached_property
    def of_passes(self) -> Strategy:
        """What passes depend on: ZeRO-1 splits what an update has, and nothing that passes need."""
        return replace(self, zero=0) if self.zero == 1 else self

    def sharing_replicas(self, tp: int) -> int:
        """Of how many replicas (or ranks of cp) the tokens meet at a device's experts: of the ranks that
        share these, one in each group of `tp` counts."""
        return self.ep // tp if self.whole_experts else self.ep

    @property
    def marks(self) -> tuple[str, ...]:
        """What differs from the plain way: ``vpp2``, ``sp``, ``ep8``, ``etp1``, ``zero1``,
        ``recompute``, ``share-forward``."""
        marks = {
            f"vpp{self.vpp}": self.vpp > 1,
            "sp": self.sp,
            f"ep{self.ep}": self.ep > 1,
            "etp1": self.whole_experts,
            f"zero{self.zero}": self.zero > 0,
            "recompute": self.recompute == "full",
            "no-cache": not self.kv_cache,
            "share-forward": self.share_forward,
        }
        return tuple(mark for mark, present in marks.items() if present)


PLAIN = Strategy()
