"""What generates: an engine's own part of a generate node, as `rollout` calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hflow.runtime.rows import Rows


@dataclass(frozen=True)
class Sampling:
    """Responses of at most `max_new_tokens`; `seed`, `step` and `stream` choose the random numbers."""

    max_new_tokens: int
    temperature: float
    seed: int
    step: int
    stream: int
    eos_id: int


@dataclass(frozen=True)
class Answers:
    """What was sampled, as ragged rows: tokens int32 and their log-probs float32."""

    tokens: Rows
    log_probs: Rows


class Sampler(Protocol):
    def __call__(self, prompts: Rows, ids: Tensor, sampling: Sampling) -> Answers:
        """Continue prompts (ragged int32 token ids); a response ends with, and includes, its end token.

        Args:
            ids: int64 ``[prompts * n]``, the global numbers of the rows to be made, to which their random
                numbers belong; row r continues prompt r // n.
        """
        ...
