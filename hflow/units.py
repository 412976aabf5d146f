"""Numbers and texts as people read them: seconds, bytes, counts, sets of devices, what others wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, log10


def printable(text: str) -> str:
    """A text without signs that a terminal would obey, or cannot show."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def seconds(value: float) -> str:
    """``14.0 s``, ``0.19 s``, ``12 ms``, ``<1 ms``; ``-`` for nothing at all."""
    if value == 0:
        return "-"
    if value < 0.001:
        return "<1 ms"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"


def interval(low: float, high: float) -> str:
    """``0.42 to 0.72 s``, ``98 ms to 0.12 s``, ``<1 ms``."""
    first, last = seconds(low), seconds(high)
    if first == last:
        return first
    number, *unit = first.split(" ")
    return f"{number} to {last}" if unit == last.split(" ")[1:] else f"{first} to {last}"


def size(num_bytes: float) -> str:
    """Decimal bytes: ``15.2 GB``, ``3.1 MB``, ``512 B``; ``-`` for nothing."""
    if num_bytes == 0:
        return "-"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def count(value: float) -> str:
    """``1,234`` with at most three significant digits behind a unit: ``16.7 k``, ``1.23 M``."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= factor:
            scaled = value / (1e3 if unit == "k" else factor)
            return f"{scaled:.3g} {unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(bytes_per_s: float) -> str:
    """``450 GB/s``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.4g} {unit}/s"
    return f"{bytes_per_s:.4g} B/s"


def devices(numbers: Iterable[int]) -> str:
    """``0-3,6``, ascending."""
    return device_text(tuple(sorted(numbers)))


def device_text(devices: tuple[int, ...]) -> str:
    """``0-3,6``; order is kept, so a regrouped mesh shows it."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def short_devices(numbers: Sequence[int], most: int = 26) -> str:
    """The same in at most `most` characters, with how many there are where that is too few for all."""
    text, end = devices(numbers), f",… ({len(numbers)})"
    if len(text) <= most:
        return text
    return text[: most - len(end)].rpartition(",")[0] + end


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def figure(value: float) -> str:
    """A number of a chart with three significant digits: ``0``, ``-0.25``, ``15 k``."""
    unit, factor = _scale(abs(value))
    return f"{value / factor:.3g}{unit}"


def axis(values: Sequence[float]) -> list[str]:
    """Labels of evenly spaced ticks, with as many decimals as tell them apart: ``13.65 k, 13.70 k``."""
    if len(values) < 2:
        return [figure(value) for value in values]
    unit, factor = _scale(max(map(abs, values)))
    spacing = (values[1] - values[0]) / factor
    decimals = max(0, -floor(log10(spacing) + 1e-9))
    if decimals > 5:
        return [f"{value / factor:.1e}{unit}" if value else "0" for value in values]
    return [f"{value / factor:.{decimals}f}{unit}" if value else "0" for value in values]


def _scale(value: float) -> tuple[str, float]:
    for unit, factor in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= factor:
            return unit, factor
    return "", 1.0


def duration(value_s: float) -> str:
    """Seconds as ``42 s``, ``20 min 40 s`` or ``3 h 5 min``."""
    whole = round(value_s)
    if whole < 60:
        return seconds(value_s)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
