"""What the user may ask of the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean

PlacementPolicy = Literal["auto", "colocate", "split", "standalone"]
Planner = Literal["exact", "exhaustive", "hybridflow", "deepspeed-chat", "openrlhf", "nemo-aligner"]
PLACEMENTS: tuple[PlacementPolicy, ...] = get_args(PlacementPolicy)
PLANNERS: tuple[Planner, ...] = get_args(Planner)


@dataclass(frozen=True)
class PlannerOptions:
    """What is searched, and how.

    `placement`: ``colocate`` puts all models on the same devices, ``split`` those with an `lm` head apart
    from those with a `scalar` one (any two sets where all are alike), ``standalone`` each on its own;
    ``auto`` tries every partition.

    `planner`: ``exact`` is branch and bound; ``exhaustive`` prices all plans; ``hybridflow`` is Algorithms 1
    and 2 of arXiv:2409.19256 as published; the others are the fixed plans of other systems.

    `budget_s`: seconds after which ``exact`` returns the best plan so far, with the gap that is left; None
    for a fixed effort of some seconds, so that equal input gives equal plans on any machine.

    `engines`: texts like ``rollout=sglang``, for generate nodes that shall not run on what the cluster has.

    `on_priced`: ``exhaustive`` tells it now and then how many plans it has priced, of how many; both begin
    anew where a wider space is searched. To count them takes a small part of the time that they take.

    Raises:
        HflowError: HF309 for a placement or a planner that does not exist.
    """

    placement: PlacementPolicy = "auto"
    planner: Planner = "exact"
    budget_s: float | None = None
    engines: tuple[str, ...] = ()
    on_priced: Callable[[int, int], None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for what, name, known in (
            ("placement", self.placement, PLACEMENTS),
            ("planner", self.planner, PLANNERS),
        ):
            if name not in known:
                help_ = did_you_mean(str(name), known, f"{what}s")
                raise HflowError(Diagnostic("HF309", f"no {what} is called `{name}`", help=help_))


DEFAULTS = PlannerOptions()
