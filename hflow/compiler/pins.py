"""``--pin NODE=tp2,dp2@0-3``: a node's parallel sizes and devices, fixed by the user."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hflow.compiler.cluster import Cluster
from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.graph.graph import Graph

AXES = ("pp", "dp", "tp")
_SIZE = re.compile(r"^(pp|dp|tp)([1-9]\d*)$")
_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


@dataclass(frozen=True)
class Pin:
    """`sizes` holds the axes that were given; `devices` is None when they were not."""

    node: str
    sizes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...] | None
    text: str


def parse_pins(texts: Iterable[str], graph: Graph, cluster: Cluster) -> tuple[Pin, ...]:
    """Read and check pins against the graph and the cluster.

    Raises:
        HflowError: HF302 with one diagnostic per bad pin.
    """
    pins: list[Pin] = []
    bad: list[Diagnostic] = []
    for text in texts:
        try:
            pins.append(_parse(text, graph, cluster))
        except ValueError as error:
            message, help_ = error.args if len(error.args) == 2 else (error.args[0], "")
            bad.append(Diagnostic("HF302", f"--pin {text}: {message}", help=help_))
    bad += [
        Diagnostic("HF302", f"--pin {pin.text}: `{pin.node}` is pinned twice")
        for i, pin in enumerate(pins)
        if any(other.node == pin.node for other in pins[:i])
    ]
    if bad:
        raise HflowError(bad)
    return tuple(pins)


def _parse(text: str, graph: Graph, cluster: Cluster) -> Pin:
    node, separator, rest = text.partition("=")
    if not separator or not rest:
        raise ValueError("not of the form NODE=tp2,dp2@0-3", "sizes, devices, or both may be given")
    names = [n.name for n in graph.nodes]
    if node not in names:
        raise ValueError(f"no node `{node}`", did_you_mean(node, names, "nodes"))
    if graph.node(node).model is None:
        models = [n.name for n in graph.nodes if n.model]
        raise ValueError(
            f"`{node}` runs where its values lie", f"nodes that can be pinned: {', '.join(models)}"
        )
    sizes_text, _, devices_text = rest.partition("@")
    devices = _devices(devices_text, cluster) if "@" in rest else None
    return Pin(node, _sizes(sizes_text), devices, text)


def _sizes(text: str) -> tuple[tuple[str, int], ...]:
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        match = _SIZE.match(part.strip())
        if not match:
            raise ValueError(f"`{part}` is no size", "sizes are pp, dp or tp with a number: tp2")
        if match[1] in sizes:
            raise ValueError(f"`{match[1]}` is given twice")
        sizes[match[1]] = int(match[2])
    return tuple(sorted(sizes.items()))


def _devices(text: str, cluster: Cluster) -> tuple[int, ...]:
    devices: list[int] = []
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if not match:
            raise ValueError(f"`{part}` is no device range", "write devices like 0-3 or 0,2")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= cluster.num_devices:
            known = f"0-{cluster.num_devices - 1}"
            raise ValueError(f"there is no device {last}", f"`{cluster.name}` has devices {known}")
        devices += range(first, last + 1)
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(f"`{text}` names a device twice, or none")
    if devices != sorted(devices):
        raise ValueError(f"`{text}` is not ascending", "hflow orders the devices of a mesh itself")
    return tuple(devices)
