"""How a run is kept: when it writes checkpoints, what it exports, how often it begins again.

The section `run` of a graph file says it. It is no part of the graph, nor of its plan: two runs that are kept
differently are runs of one algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Export = Literal["last", "best", "none"]
Mode = Literal["max", "min"]
TrackerName = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are written, and which of them stay.

    `every`: after so many steps; 0: not by their number. `seconds`: once so many have passed since the last
    one; 0: not by time. With either, one more after the last step. `keep`: so many complete ones stay, the
    newest. `best`: a metric; the checkpoint in which it is greatest (or least, by `mode`) stays as well.
    `on_signal`: one is written when the run is interrupted.
    """

    every: int = 0
    seconds: float = 0.0
    keep: int = 2
    best: str = ""
    mode: Mode = "max"
    on_signal: bool = True


@dataclass(frozen=True)
class HangPolicy:
    """When a run counts as hung: an instruction of a worker takes longer than `factor` times what it was
    measured, or else predicted, to take; at least `least_s` seconds, and at least `first_s` as long as it was
    never measured. `factor` 0: never."""

    factor: float = 10.0
    least_s: float = 300.0
    first_s: float = 14400.0


@dataclass(frozen=True)
class SamplePolicy:
    """Which samples a run keeps.

    `every`: those of steps whose number is a multiple of it, and of the last step; 0: none. `rows`: of a step
    at most so many, the first ones. `keep_mb`: so many megabytes (10^6 bytes) of them, the newest.
    """

    every: int = 10
    rows: int = 1024
    keep_mb: float = 100.0


@dataclass(frozen=True)
class ReplanPolicy:
    """When a run goes on under another plan, made for the lengths that it sees.

    `every`: steps after which lengths are looked at, from the start or from the last plan on; 0: never.
    `moved`: a plan is looked for when the mean, the median or the 95th percentile of some node's lengths
    differs by more than this share from what was last planned for. `gain`: the run goes on under it when that
    saves more than so many times what switching costs.
    """

    every: int = 0
    moved: float = 0.2
    gain: float = 2.0


@dataclass(frozen=True)
class RunConfig:
    """`export`: the weights that are exported at the end: the last, those of the best checkpoint, or none.
    `restarts`: how often a run that lost workers begins again from its newest checkpoint. `grace_s`: seconds
    that an interrupted run has to write a checkpoint. `retry`: codes of other failures after which it begins
    again. `elastic`: when lost devices do not come back within `wait_s`, go on with those that are left.
    `hang`: when it counts as hung, which is a failure. `samples`: which of them are kept. `trackers`: where
    metrics and samples go as well, while the run goes on. `replan`: when it goes on under another plan.
    `show`: the metrics in the line of each step; none: reward, losses, and what else fits."""

    checkpoint: CheckpointPolicy = CheckpointPolicy()
    export: Export = "last"
    restarts: int = 0
    grace_s: float = 30.0
    retry: tuple[str, ...] = ()
    elastic: bool = False
    wait_s: float = 60.0
    hang: HangPolicy = HangPolicy()
    samples: SamplePolicy = SamplePolicy()
    trackers: tuple[TrackerName, ...] = ()
    replan: ReplanPolicy = ReplanPolicy()
    show: tuple[str, ...] = ()


DEFAULT_RUN = RunConfig()
