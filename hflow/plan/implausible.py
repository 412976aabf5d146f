"""Numbers of a cluster file that are hardly meant in the unit in which they count: `flops: 989` for 989e12.

Bounds are wide: whatever a machine has that somebody could own, or `hflow calibrate` could measure on a slow
one with many workers, lies within them. A number in a wrong unit is off by a thousand or more, and seldom
does. They leave room below the slowest and above the fastest that were found:

- `flops`: a GPU has 0.24e12 (Jetson Nano, f32; a tenth of it where bf16 is emulated) to 125e15 (a wafer of
  Cerebras, WSE-3); one worker on a CPU 0.5e9 (a quarter of a Raspberry Pi 3) to 10e12 (two Xeons with AMX).
- `memory_bandwidth`: a GPU has 16e9 (GeForce MX110) to 21e15 (WSE-3, SRAM); a worker on a CPU copies 1e9
  where it is alone, and a hundredth where a hundred do, to 10e12 (caches of an EPYC).
- `memory_gb`: a GPU has 1 to 1,000; a worker on a CPU a share of 0.5 to 48,000 (HPE Superdome).
- `bandwidth` inside a host: between GPUs 0.25e9 (PCIe 1.0 x1) to 1.8e12 (NVLink 6); gloo between CPU workers
  that share a core 1e6. Between hosts: 10e6 where there are GPUs (100 Mbit/s), else 1e6, to 1.8e12 (racks
  joined by NVLink). To the host's memory: 0.25e9 to 0.9e12 (NVLink-C2C).
- `latency`: 0 (an ideal link) to 0.3 s (around the world). `layer_overhead`: 0 to 0.1 s (workers that share a
  core). `kernel_latency`: 0 to some milliseconds.

What is suggested instead must be usual, which is narrower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hflow.diagnostics import Diagnostic
from hflow.graph.source.document import Document, KeyPath
from hflow.plan.engine_profile import Platform

LeastAndMost = tuple[float, float]


@dataclass(frozen=True)
class UnitSlip:
    """A unit that somebody may have written instead: a number in it times `factor` is one in the file's unit,
    and `suffix` is how YAML says that factor; empty where it is no power of ten."""

    unit: str
    factor: float
    suffix: str = ""


@dataclass(frozen=True)
class Plausible:
    """`unit`: what the number counts; `bounds`: outside of them it is implausible; `usual`: what is likely
    to be meant; `slips`: the likeliest first."""

    unit: str
    bounds: Mapping[Platform, LeastAndMost]
    usual: Mapping[Platform, LeastAndMost]
    slips: tuple[UnitSlip, ...]


def _alike(bounds: LeastAndMost) -> Mapping[Platform, LeastAndMost]:
    return {"cpu": bounds, "cuda": bounds}


_FLOPS = (
    UnitSlip("TFLOP/s", 1e12, "e12"),
    UnitSlip("GFLOP/s", 1e9, "e9"),
    UnitSlip("PFLOP/s", 1e15, "e15"),
)
_RATES = (UnitSlip("GB/s", 1e9, "e9"), UnitSlip("TB/s", 1e12, "e12"), UnitSlip("MB/s", 1e6, "e6"))
_BITS = (UnitSlip("Gbit/s", 1e9 / 8), UnitSlip("Mbit/s", 1e6 / 8))
_SIZES = (UnitSlip("MiB", 2**20 / 1e9), UnitSlip("TB", 1e3, "e3"))
_TIMES = (UnitSlip("µs", 1e-6, "e-6"), UnitSlip("ms", 1e-3, "e-3"), UnitSlip("ns", 1e-9, "e-9"))

_BYTES_PER_S, _GB, _SECONDS = "bytes per second", "x 10^9 bytes", "seconds"
_LINK_S = Plausible(_SECONDS, _alike((0, 1)), _alike((1e-6, 5e-3)), _TIMES)
OF_DEVICES: Mapping[str, Plausible] = {
    "flops": Plausible(
        "floating-point operations per second",
        {"cpu": (1e7, 1e15), "cuda": (1e10, 2e17)},
        {"cpu": (1e9, 2e13), "cuda": (5e12, 1e16)},
        _FLOPS,
    ),
    "bf16_flops": Plausible(
        "floating-point operations per second", _alike((1e7, 1e15)), _alike((1e9, 1e14)), _FLOPS
    ),
    "memory_gb": Plausible(
        _GB, {"cpu": (1e-2, 1e5), "cuda": (0.25, 4e3)}, {"cpu": (0.5, 5e4), "cuda": (1, 1e3)}, _SIZES
    ),
    "memory_bandwidth": Plausible(
        _BYTES_PER_S,
        {"cpu": (1e6, 1e14), "cuda": (1e9, 1e17)},
        {"cpu": (1e9, 2e12), "cuda": (5e10, 3e13)},
        _RATES,
    ),
    **{
        name: Plausible(_SECONDS, _alike((0, 1)), _alike((1e-6, 5e-2)), _TIMES)
        for name in ("layer_overhead", "score_layer_overhead", "train_layer_overhead")
    },
    "kernel_latency": Plausible(_SECONDS, _alike((0, 0.1)), _alike((1e-6, 1e-3)), _TIMES),
}
OF_LINKS: Mapping[tuple[str, str], Plausible] = {
    ("intra_host", "bandwidth"): Plausible(
        _BYTES_PER_S,
        {"cpu": (1e5, 1e13), "cuda": (1e7, 2e13)},
        {"cpu": (1e8, 1e12), "cuda": (1e9, 4e12)},
        _RATES,
    ),
    ("inter_host", "bandwidth"): Plausible(
        _BYTES_PER_S,
        {"cpu": (1e5, 2e13), "cuda": (1e6, 2e13)},
        {"cpu": (1e8, 2e11), "cuda": (1e9, 1e12)},
        (*_BITS, *_RATES),
    ),
    ("host", "bandwidth"): Plausible(_BYTES_PER_S, _alike((1e7, 1e13)), _alike((1e9, 2e12)), _RATES),
    ("intra_host", "latency"): _LINK_S,
    ("inter_host", "latency"): _LINK_S,
    ("host", "latency"): _LINK_S,
}
HOST_MEMORY = Plausible(_GB, _alike((0.25, 1e5)), _alike((4, 5e4)), _SIZES)
TOKEN_STEP = Plausible(_SECONDS, _alike((0, 1)), _alike((1e-5, 0.2)), _TIMES)
WAKE_RATE = Plausible(_BYTES_PER_S, _alike((1e7, 1e13)), _alike((5e8, 2e12)), _RATES)
WAKE = Plausible(_SECONDS, _alike((0, 600)), _alike((0.01, 120)), _TIMES)
SERVER = Plausible(_GB, _alike((0, 1e3)), _alike((0.1, 50)), _SIZES)


def implausible(document: Document, platforms: Sequence[Platform]) -> Iterator[Diagnostic]:
    """A warning (HF301) for every number of a valid cluster file that is hardly meant so, with the units in
    which it would be usual.

    Args:
        platforms: of the devices of each kind of host, in the order of the file.
    """
    groups: list[KeyPath] = [("groups", i) for i in range(len(platforms))]
    for where, platform in zip(groups if "groups" in document.keys(()) else [()], platforms):
        for key, known in OF_DEVICES.items():
            yield from _warned(document, (*where, "device", key), known, platform)
    slowest: Platform = "cpu" if "cpu" in platforms else "cuda"
    for names, known in OF_LINKS.items():
        yield from _warned(document, ("links", *names), known, slowest)
    yield from _warned(document, ("host_memory_gb",), HOST_MEMORY, slowest)
    yield from _warned(document, ("engines", "server_gb"), SERVER, slowest)
    yield from _warned(document, ("engines", "token_step"), TOKEN_STEP, slowest)
    yield from _warned(document, ("engines", "wake", "bandwidth"), WAKE_RATE, slowest)
    yield from _warned(document, ("engines", "wake", "latency"), WAKE, slowest)


def _warned(document: Document, path: KeyPath, known: Plausible, platform: Platform) -> Iterator[Diagnostic]:
    item = document.get(path)
    value = item.value if item else None
    if not isinstance(value, int | float):  # left out
        return
    least, most = known.bounds[platform]
    if least <= value <= most:
        return
    name, text = ".".join(map(str, path)), _text(value)
    message = f"`{name}: {text}` is {text} {known.unit}, implausibly {'low' if value < least else 'high'}"
    yield Diagnostic("HF301", message, document.span(path), _help(value, known, platform), "warning")


def _help(value: float, known: Plausible, platform: Platform) -> str:
    """All that it may have been meant for, else the bounds."""
    least, most = known.usual[platform]
    meant = [_meant(value, slip) for slip in known.slips if least <= value * slip.factor <= most]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    least, most = known.bounds[platform]
    return f"from {_text(least)} to {_text(most)} is plausible"


def _meant(value: float, slip: UnitSlip) -> str:
    """``989e12 (989 TFLOP/s)``."""
    text = _text(value)
    is_short = bool(slip.suffix) and "e" not in text
    return f"{f'{text}{slip.suffix}' if is_short else _text(value * slip.factor)} ({text} {slip.unit})"


def _text(value: float) -> str:
    """Six digits at most, as people write numbers."""
    return f"{value:.6g}".replace("e+", "e")
