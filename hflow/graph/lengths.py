"""How long texts are: a distribution of lengths in tokens, up to a greatest one.

What is stated is a mean, quantiles, or both; of all distributions that agree with them, this is the one of
the greatest entropy, which assumes nothing else (Jaynes, Phys. Rev. 106:620, 1957). Between two quantiles its
density is a part of an exponential, with one rate for all parts: a mean alone makes an exponential that is
cut off at the greatest length, quantiles alone make uniform parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import exp, expm1, log1p

QUANTILES: Mapping[str, float] = {
    "p0": 0.0, "p5": 0.05, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95,
    "p99": 0.99, "p100": 1.0,
}  # fmt: skip
_STEEPEST = 1e7  # a rate times the greatest length: all of a part is at one of its ends
_HALVINGS = 120
_STEPS = 256  # of the sum that is the mean of the longest of several


class ImpossibleLengthsError(ValueError):
    """No lengths are as stated. `key`: the key that says what cannot be; `message`: a phrase about its value.

    `help`: what would be possible.
    """

    def __init__(self, key: str, message: str, help: str):
        super().__init__(message)
        self.key, self.message, self.help = key, message, help


@dataclass(frozen=True)
class _Band:
    """A share of the texts whose lengths are between two quantiles, with a density that falls as
    exp(-`rate` * t), or rises where the rate is negative."""

    low: float
    high: float
    share: float
    rate: float = 0.0

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def steepness(self) -> float:
        return self.rate * self.width

    @property
    def mean(self) -> float:
        return self.low + self.width * _mean(self.steepness)

    @property
    def mean_square(self) -> float:
        inside = self.width * (
            2 * self.low * _mean(self.steepness) + self.width * _mean_square(self.steepness)
        )
        return self.low**2 + inside

    def survival(self, tokens: float) -> float:
        """Of the part's texts, how many are longer."""
        if tokens < self.low:
            return 1.0
        return _survival((tokens - self.low) / self.width, self.steepness) if tokens < self.high else 0.0

    def excess(self, tokens: float) -> float:
        """The mean of what the part's texts are longer than `tokens`, 0 of those that are not."""
        if tokens <= self.low:
            return self.mean - tokens
        if tokens >= self.high:
            return 0.0
        return self.width * _excess((tokens - self.low) / self.width, self.steepness)

    def quantile(self, share: float) -> float:
        """The length that so many of the part's texts do not exceed."""
        return self.low + self.width * _quantile(share, self.steepness)


@dataclass(frozen=True)
class Lengths:
    """Lengths of texts, in tokens. `quantiles`: of some keys of `QUANTILES`, by rising probability.

    `greatest`: what the type of the texts admits; `longest` may be less.
    """

    mean: float
    greatest: int
    quantiles: tuple[tuple[str, float], ...] = ()

    @staticmethod
    def of(greatest: int, mean: float | None, quantiles: Mapping[str, float]) -> Lengths:
        """What is stated; without a mean the one that follows from the quantiles.

        Raises:
            ImpossibleLengthsError: no distribution up to `greatest` is so.
        """
        known = tuple((key, float(quantiles[key])) for key in QUANTILES if key in quantiles)
        _check_quantiles(known, greatest)
        parts = _bands(known, greatest)
        if mean is None:
            return Lengths(sum(part.share * part.mean for part in parts), greatest, known)
        least, most = (sum(p.share * end for p, end in zip(parts, ends)) for ends in _ends(parts))
        slack = 1e-6 * greatest  # a mean that was written with few digits
        if mean > greatest + slack:
            raise ImpossibleLengthsError("mean", f"is above the greatest length, {greatest}", _WIDEN)
        if not least - slack <= mean <= most + slack:
            told = f"with these quantiles it is from {least:g} to {most:g}"
            raise ImpossibleLengthsError("mean", "does not agree with the quantiles", told)
        return Lengths(min(float(mean), greatest), greatest, known)

    @cached_property
    def _fitted(self) -> tuple[_Band, ...]:
        """The parts, with the rate that gives the mean."""
        parts = _bands(self.quantiles, self.greatest)
        if not self.quantiles and self.mean >= self.greatest:
            return (_Band(self.greatest, self.greatest, 1.0),)
        low, high = (sign * _STEEPEST / self.greatest for sign in (-1, 1))
        for _ in range(_HALVINGS):
            rate = (low + high) / 2
            found = sum(part.share * _with(part, rate).mean for part in parts)
            low, high = (rate, high) if found > self.mean else (low, rate)
        return tuple(_with(part, (low + high) / 2) for part in parts)

    @property
    def longest(self) -> float:
        """The length that no text exceeds."""
        return self._fitted[-1].high

    def survival(self, tokens: float) -> float:
        """Which share of the texts is longer."""
        return sum(part.share * part.survival(tokens) for part in self._fitted)

    def cut(self, greatest: int) -> Lengths:
        """What is left of lengths with all quantiles where texts may have no more than `greatest` tokens."""
        if self.longest <= greatest:
            return Lengths(self.mean, greatest, self.quantiles)
        quantiles = {key: min(tokens, greatest) for key, tokens in self.quantiles}
        assert quantiles.keys() == QUANTILES.keys()
        return Lengths.of(greatest, self.mean - self.excess(greatest), quantiles)

    def excess(self, tokens: float) -> float:
        """The mean of what texts are longer than `tokens`, 0 of those that are not: the integral of
        `survival` from there."""
        return sum(part.share * part.excess(tokens) for part in self._fitted)

    def quantile(self, probability: float) -> float:
        """The length that such a share of the texts does not exceed."""
        below = 0.0
        for part in self._fitted:
            if probability <= below + part.share:
                return part.quantile(max(0.0, (probability - below) / part.share))
            below += part.share
        return self.longest

    @cached_property
    def mean_square(self) -> float:
        """In tokens squared."""
        return sum(part.share * part.mean_square for part in self._fitted)

    def longest_of(self, texts: float) -> float:
        """The mean length of the longest of so many."""
        return self.longest / _STEPS * sum(1 - ended**texts for ended in self._ended)

    @cached_property
    def _ended(self) -> tuple[float, ...]:
        """Which share of the texts is no longer, at steps up to the longest."""
        width = self.longest / _STEPS
        return tuple(1 - self.survival((step + 0.5) * width) for step in range(_STEPS))

    def __str__(self) -> str:
        """``mean=1019, p95=3000``."""
        return ", ".join(f"{key}={tokens:.6g}" for key, tokens in (("mean", self.mean), *self.quantiles))

    @property
    def variance(self) -> float:
        """In tokens squared."""
        return max(0.0, self.mean_square - self.mean**2)


_WIDEN = "the greatest length is what the node's options admit: state less, or let them admit more"


def _check_quantiles(known: tuple[tuple[str, float], ...], greatest: int) -> None:
    before: tuple[str, float] = ("", 0.0)
    for key, tokens in known:
        if tokens > greatest:
            raise ImpossibleLengthsError(key, f"is above the greatest length, {greatest}", _WIDEN)
        if tokens < before[1]:
            told = f"quantiles rise: `{before[0]}` is {before[1]:g}"
            raise ImpossibleLengthsError(key, f"is less than `{before[0]}`", told)
        before = key, tokens


def _bands(quantiles: tuple[tuple[str, float], ...], greatest: int) -> tuple[_Band, ...]:
    """Uniform ones, between 0, the quantiles and the greatest length."""
    known = [(QUANTILES[key], tokens) for key, tokens in quantiles]
    if not known or known[0][0] > 0:
        known.insert(0, (0.0, 0.0))
    if known[-1][0] < 1:
        known.append((1.0, float(greatest)))
    return tuple(_Band(low, high, above - below) for (below, low), (above, high) in pairwise(known))


def _ends(parts: tuple[_Band, ...]) -> Iterator[list[float]]:
    yield [part.low for part in parts]
    yield [part.high for part in parts]


def _with(part: _Band, rate: float) -> _Band:
    return _Band(part.low, part.high, part.share, rate)


# Of an exponential between 0 and 1 with density ~ exp(-z x). Where z is small, that is uniform but for terms
# which rounding would hide; where it is negative, the mirror image.
_FLAT = 1e-5


def _mean(z: float) -> float:
    if abs(z) < _FLAT:
        return 0.5 - z / 12
    if z < 0:
        return 1 - _mean(-z)
    return 1 / z - (1 / expm1(z) if z < 700 else 0.0)


def _mean_square(z: float) -> float:
    if abs(z) < 1e-3:
        return 1 / 3 - z / 12
    if z < 0:
        return 1 - 2 * _mean(-z) + _mean_square(-z)
    return 2 / z**2 - ((1 + 2 / z) / expm1(z) if z < 700 else 0.0)


def _survival(x: float, z: float) -> float:
    if abs(z) < _FLAT:
        return 1 - x
    if z < 0:
        return 1 - _survival(1 - x, -z)
    return (exp(-z * x) - exp(-z)) / -expm1(-z)


def _excess(x: float, z: float) -> float:
    """The integral of `_survival` from x to 1."""
    if abs(z) < _FLAT:
        return (1 - x) ** 2 / 2
    if z < 0:
        return (1 - x) - (_mean(-z) - _excess(1 - x, -z))
    return ((exp(-z * x) - exp(-z)) / z - (1 - x) * exp(-z)) / -expm1(-z)


def _quantile(probability: float, z: float) -> float:
    if abs(z) < _FLAT or probability >= 1:
        return min(1.0, probability)
    if z < 0:
        return 1 - _quantile(1 - probability, -z)
    return min(1.0, -log1p(probability * expm1(-z)) / z)
