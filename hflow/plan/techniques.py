"""Techniques that no engine of hflow has, to be priced before somebody builds them (`compile --what-if`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: a draft model makes `drafted` tokens for each row, which the model reads at once;
    `made`: how many tokens a row has more after that, on average, 1 to `drafted` + 1 (Leviathan et al.,
    arXiv:2211.17192). The draft model is one layer and a head like those of the model (EAGLE-3,
    arXiv:2503.01840). The defaults are the drafts and the mean of a reasoning run in NeMo-RL
    (arXiv:2604.26779)."""

    drafted: int = 3
    made: float = 2.47


@dataclass(frozen=True)
class PartialRollouts:
    """A rollout begins `begun` times as many rows as it hands over, and ends when that many have ended; the
    others go on in the next step (APRIL, arXiv:2509.18521)."""

    begun: float = 2.0


Technique = Speculation | PartialRollouts


@dataclass(frozen=True)
class Techniques:
    """Those that engines are taken to have; today none."""

    speculation: Speculation | None = None
    partial_rollouts: PartialRollouts | None = None


NO_TECHNIQUES = Techniques()
