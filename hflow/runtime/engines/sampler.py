"""What generates: an engine's own part of a generate node, as `rollout` calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hflow.graph.types import NO_TRUNCATION, Truncation
from hflow.runtime.ends import EndRule
from hflow.runtime.kept import KeptSets
from hflow.runtime.rows import Rows


@dataclass(frozen=True)
class Sampling:
    """Responses of at most `max_new_tokens`; `seed`, `step` and `stream` choose the random numbers.
    `max_kept`: the size up to which the sets of tokens are told that `truncation` leaves; None: they are not.
    `routes`: whether the experts are told that routers choose.
    """

    max_new_tokens: int
    temperature: float
    seed: int
    step: int
    stream: int
    ends: EndRule
    truncation: Truncation = NO_TRUNCATION
    max_kept: int | None = None
    routes: bool = False


@dataclass(frozen=True)
class Answers:
    """What was sampled, as ragged rows: tokens int32, their log-probs float32, and, where it is known, int32
    versions of the weights that sampled each token; `begun`: that of the weights at the beginning; `end_s`:
    when the last was there, in seconds since the epoch. With `max_kept` the `kept` sets, and which rows have
    `overflown`, bool ``[rows]``. With `routes` those of prompts and responses, `hflow.runtime.routes`."""

    tokens: Rows
    log_probs: Rows
    versions: Rows | None = None
    begun: int = 0
    end_s: float | None = None
    kept: KeptSets | None = None
    overflown: Tensor | None = None
    routes: Rows | None = None


class NotFinite(ArithmeticError):  # noqa: N818  (it is what a number is)
    """A number of a row, which the message names, that a token is or was sampled by."""


class Sampler(Protocol):
    def __call__(self, prompts: Rows, ids: Tensor, sampling: Sampling) -> Callable[[], Answers]:
        """Begin to continue prompts (ragged int32 token ids); a response ends as `EndRule` says, and its
        log-probs are of the truncated distribution. Gives what waits for the answers.

        Args:
            ids: int64 ``[prompts * n]``, the global numbers of the rows to be made, to which their random
                numbers belong; row r continues prompt r // n.

        Raises:
            NotFinite: as does what waits for the answers.
        """
        ...
