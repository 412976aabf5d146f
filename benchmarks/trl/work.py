"""The work that both sides of benchmarks/step_trl.py do, and how they are told to do a step of it.

Every contestant is a process that waits for a line on its standard input before each step and then writes
one: the step's seconds and tokens. So steps of different contestants take turns on an idle machine.
This module imports nothing but Python's own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """`prompts` times `samples` responses of at most `new` tokens; prompts of `shortest` to `longest` tokens.

    `eos_rate`: the chance of every token of a response to be its last; 0 makes all responses `new` long.
    `dtype`: f32 or bf16, of weights and of what is computed with them.
    """

    algorithm: str
    prompts: int = 16
    samples: int = 4
    new: int = 32
    shortest: int = 32
    longest: int = 32
    eos_rate: float = 0.0
    kl_coef: float = 0.0
    dtype: str = "f32"

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


# What TRL's own defaults are not, for either trainer; and how its 64 rows are cut.
QUIET: dict[str, Any] = {
    "learning_rate": 1e-6,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_strategy": "no",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8},
    "best": {"per_device_train_batch_size": 64, "gradient_checkpointing": False},
}
SETTINGS["static cache"] = SETTINGS["best"] | {"cache_implementation": "static"}  # GRPO only

WORKS = {
    "grpo": Work("grpo"),
    "grpo with reference": Work("grpo_reference", kl_coef=0.04),
    "grpo, ragged": Work("grpo", new=128, shortest=8, eos_rate=1 / 32),
    "grpo, long prompts": Work("grpo", prompts=8, samples=8, new=64, shortest=256, longest=256),
    "grpo, bf16": Work("grpo", dtype="bf16"),
    "grpo, ragged, bf16": Work("grpo", new=128, shortest=8, eos_rate=1 / 32, dtype="bf16"),
    "ppo": Work("ppo", prompts=64, samples=1, kl_coef=0.05),
}


@dataclass(frozen=True)
class Contest:
    """What a contestant reads from its command line: ``WORK SETTING FOLDER``."""

    work: Work
    setting: str
    folder: Path  # holds prompts.jsonl, and the models lm and scalar

    @staticmethod
    def read() -> Contest:
        parser = argparse.ArgumentParser()
        parser.add_argument("work", choices=WORKS)
        parser.add_argument("setting")
        parser.add_argument("folder", type=Path)
        options = parser.parse_args()
        return Contest(WORKS[options.work], options.setting, options.folder)

    def questions(self) -> list[str]:
        lines = (self.folder / "prompts.jsonl").read_text().splitlines()
        return [json.loads(line)["question"] for line in lines]


class Turns:
    """Between steps: `end` reports the one that was done, `begin` waits for leave to do the next."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")  # what libraries print must not get between
        os.dup2(2, 1)
        self._started: float | None = None

    def begin(self) -> None:
        """Raises SystemExit when no more steps are wanted."""
        if not sys.stdin.readline():
            raise SystemExit(0)
        self._started = time.perf_counter()

    def end(self, **told: Any) -> None:
        assert self._started is not None
        time_s, self._started = time.perf_counter() - self._started, None
        print(json.dumps({"s": time_s, **told}), file=self._answers, flush=True)
