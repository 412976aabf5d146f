"""Pins of nodes that train, or score with, models of one base: what says how and where one lies says it of
all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hflow.compiler.candidates.shared_bases import sharing_models
from hflow.compiler.pins import Pin
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Graph

PLACED = ("devices", "vpp")  # beside the sizes of axes, and ZeRO-3


def spread_pins(pins: Sequence[Pin], graph: Graph) -> tuple[Pin, ...]:
    """`pins`, with what they say of where weights lie given to all nodes that hold models of the same base.

    Raises:
        HflowError: HF302 when they contradict each other, or a frozen model cannot lie so.
    """
    found = {pin.node: pin for pin in pins}
    for models in sharing_models(graph):
        holders = {node.name: node.op for model in models for node in graph.holders(model)}
        nodes = [*holders]
        own = [found[name] for name in nodes if name in found]
        sizes, settings = _said(own, models)
        if not (sizes or settings):
            continue
        if "score" in holders.values():
            settings = _scoring(settings, own, models)
        for name in nodes:
            pin = found.get(name) or Pin(name, (), None, own[0].text)
            found[name] = replace(pin, sizes=tuple(sorted(sizes.items())), **settings)
    return tuple(found.values())


def _said(pins: Sequence[Pin], models: Sequence[str]) -> tuple[dict[str, int], dict[str, Any]]:
    """Sizes by axis, and other settings, of all together."""
    said: dict[str, Any] = {}
    for pin in pins:
        for key, value in _placing(pin):
            if said.setdefault(key, value) != value:
                raise HflowError(_contradiction(pins, models))
    zeros = {pin.zero for pin in pins if pin.zero is not None}
    if len(zeros) > 1 and 3 in zeros:
        raise HflowError(_contradiction(pins, models))
    if zeros == {3}:
        said["zero"] = 3
    sizes = {key: said.pop(key) for key in ("pp", "dp", "cp", "tp") if key in said}
    return sizes, said


def _placing(pin: Pin) -> Iterator[tuple[str, Any]]:
    yield from pin.sizes
    yield from ((key, getattr(pin, key)) for key in PLACED if getattr(pin, key) is not None)


def _scoring(settings: dict[str, Any], pins: Sequence[Pin], models: Sequence[str]) -> dict[str, Any]:
    """Without interleaved stages and ZeRO-3, which are for training alone."""
    if settings.get("vpp", 1) > 1 or settings.get("zero") == 3:
        names, texts = " and ".join(f"`{name}`" for name in models), " ".join(f"--pin {p.text}" for p in pins)
        message = f"{texts}: {names} share a base, and one of them only scores, which is not done so"
        raise HflowError(Diagnostic("HF302", message, help="leave out `vpp` and `zero3`, or `base`"))
    return {key: value for key, value in settings.items() if key != "vpp"}


def _contradiction(pins: Sequence[Pin], models: Sequence[str]) -> Diagnostic:
    names = " and ".join(f"`{name}`" for name in models)
    message = f"{' '.join(f'--pin {pin.text}' for pin in pins)}: {names} share a base, so they lie alike"
    return Diagnostic("HF302", message, help="pin one of them; the others follow it")
