"""The learning rate of every update of a train node, by Megatron's scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}  # Megatron's names


@dataclass(frozen=True)
class LearningRate:
    """A function of the number of the update alone, so that a run that goes on from a checkpoint has the
    rates of one that was never stopped.

    Under a `schedule` the rates are those of transformers: 0 (of ``wsd``: `min_lr`) in the first update of a
    warm-up, `lr` in update number `warmup_steps`, counted from 0, and one update's fall above `min_lr` in the
    last of `total`. Without, the first update of a warm-up has ``lr / warmup_steps``.
    """

    lr: float
    warmup_steps: int
    schedule: str | None = None
    min_lr: float = 0.0
    decay_steps: int = 0
    total: int = 0

    @staticmethod
    def of(options: Mapping[str, Any], total: int = 0) -> LearningRate:
        """Of the options of a train node that makes `total` updates in the whole run."""
        return LearningRate(
            lr=float(options["lr"]),
            warmup_steps=int(options["warmup_steps"]),
            schedule=options.get("schedule"),
            min_lr=float(options.get("min_lr", 0.0)),
            decay_steps=int(options.get("decay_steps", 0)),
            total=total,
        )

    def at(self, update: int) -> float:
        """Of the node's update number `update`, counted from 0 over the whole run."""
        if self.schedule is None:
            return self.lr * min(1.0, (update + 1) / max(1, self.warmup_steps))
        self._scheduler.num_steps = update
        return self._scheduler.get_lr({})

    @cached_property
    def _scheduler(self) -> Any:
        """It sets the rates of no optimizer: a run asks for the rate of each update."""
        assert self.schedule is not None
        no_optimizer: Any = SimpleNamespace(param_groups=[])
        return OptimizerParamScheduler(
            no_optimizer,
            init_lr=self.min_lr if self.schedule == "wsd" else 0.0,  # where transformers begin
            max_lr=self.lr,
            min_lr=self.min_lr,
            lr_warmup_steps=self.warmup_steps,
            # A constant rate may warm up for longer than the run, which Megatron would refuse.
            lr_decay_steps=max(self.total, self.warmup_steps + 1),
            lr_decay_style=STYLES[self.schedule],
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=0,
            wd_incr_style="constant",
            wsd_decay_steps=self.decay_steps,
            lr_wsd_decay_style="linear",
        )
